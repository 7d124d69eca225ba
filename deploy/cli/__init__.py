"""Entry point of the command line, `conserve`."""

import signal


def main() -> None:
    """Run the command that `sys.argv` names."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during these imports ends us silently
    from deploy.cli.application import app
    from deploy.cli.common import errors_as_sentences

    signal.signal(signal.SIGINT, interrupt)
    with errors_as_sentences():
        app(prog_name="conserve")
