"""Rows of the engine table stay sorted by name and keep their values while engines come and go."""

from hypothesis import given
from hypothesis import strategies as st

from placement.engine_table import EngineTable

NAMES = st.builds("{}-{}".format, st.sampled_from(["prefill", "decode"]), st.integers(0, 30))


@given(st.lists(NAMES, max_size=80))
def test_rows_stay_sorted_by_name_and_keep_their_values_while_engines_come_and_go(changes: list[str]) -> None:
    table, expected = EngineTable(load=0.0, closed=-1.0), dict[str, float]()
    for number, name in enumerate(changes):
        if name in expected:
            table.remove(name)
            del expected[name]
        else:
            table.add(name, load=float(number))
            expected[name] = float(number)
        in_order = sorted(expected, key=lambda name: (name.split("-")[0], int(name.split("-")[1])))
        assert [table.name(row) for row in range(len(table))] == in_order
        assert [table.name(table.row(name)) for name in in_order] == in_order
        assert [table["load"].item(table.row(name)) for name in in_order] == [expected[n] for n in in_order]
        assert not table["load"][len(in_order) :].any() and (table["closed"] == -1.0).all()
