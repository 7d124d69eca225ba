"""python -m deploy.model --out DIR: make the small model."""

import argparse
from dataclasses import fields
from pathlib import Path

from deploy.model.make import make_model
from deploy.model.shape import ModelShape


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    for field in fields(ModelShape):
        kind = float if field.name == "std" else int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    values = vars(parser.parse_args())
    out: Path = values.pop("out")
    written = make_model(out, ModelShape(**values))
    print(f"{out}: {'written' if written else 'already there'}")


if __name__ == "__main__":
    main()
