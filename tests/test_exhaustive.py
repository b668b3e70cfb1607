"""Which cases every run has: a few that together show every trait. The others run with --exhaustive only."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from tests import exhaustive

pytest_plugins = ("pytester",)


def split(
    shown: dict[str, set[Hashable]], needed: dict[str, set[Hashable]] | None = None
) -> tuple[list[str], list[str]]:
    """The names of the cases that every run has, and of those for --exhaustive, by the traits that each shows and needs."""
    needed = needed or {name: {name} for name in shown}
    marked = exhaustive.mark(shown, shown.__getitem__, needed.__getitem__)
    names = [each if isinstance(each, str) else each.values[0] for each in marked]
    assert names == list(shown), "cases keep their order"
    curated = [each for each in marked if isinstance(each, str)]
    return curated, [name for name in names if name not in curated]


def test_every_trait_is_shown_by_a_curated_case() -> None:
    shown: dict[str, set[Hashable]] = {f"case{n}": {n % 3, 10 + n % 4} for n in range(20)}
    shown["case7"].add("alone")
    curated, marked = split(shown)
    assert set().union(*(shown[name] for name in curated)) == set().union(*shown.values())
    assert "case7" in curated
    assert len(marked) > len(curated)


def test_what_shows_nothing_new_waits() -> None:
    assert split({"a": {1, 2}, "b": {1}, "c": {2}, "d": {3}}) == (["a", "d"], ["b", "c"])
    assert split({"a": {1}, "b": {1, 2}}) == (["b"], ["a"])


def test_kernels_that_are_compiled_anyway_come_first() -> None:
    shown: dict[str, set[Hashable]] = {"a": {1, 2, 3}, "b": {4}, "c": {4}}
    needed: dict[str, set[Hashable]] = {"a": {"k"}, "b": {"l"}, "c": {"k"}}
    assert split(shown, needed) == (["a", "c"], ["b"])


@pytest.mark.parametrize(
    ("arguments", "ran"), [([], ["a", "c"]), (["--exhaustive"], ["a", "b", "c"])], ids=["", "all"]
)
def test_a_run(pytester: pytest.Pytester, arguments: list[str], ran: list[Any]) -> None:
    pytester.makeini("[pytest]\nmarkers = exhaustive: beyond")
    pytester.makeconftest(
        """
        from tests import exhaustive
        pytest_addoption = exhaustive.add_option
        pytest_collection_modifyitems = exhaustive.leave_out
        """
    )
    pytester.makepyfile(
        """
        import pytest
        from tests import exhaustive
        shown = {"a": {1, 2}, "b": {1}, "c": {3}}
        @pytest.mark.parametrize("case", exhaustive.mark(shown, shown.get, lambda case: [case]))
        def test_it(case):
            print(f"ran {case}")
        """
    )
    result = pytester.runpytest_inprocess("-s", *arguments)
    result.assert_outcomes(passed=len(ran), deselected=3 - len(ran))
    result.stdout.fnmatch_lines([f"*ran {case}*" for case in ran])


def test_a_tuple_holds_the_values_of_several_parameters() -> None:
    pairs = [("a", 1), ("a", 2), ("b", 1)]
    thinned = exhaustive.thin(pairs, 2)
    assert [param.values for param in thinned] == pairs
    assert [bool(param.marks) for param in thinned] == [False, True, False]
    # A value that is a tuple itself is given in another one.
    assert exhaustive.thin([((1, 2),)], 1)[0].values == ((1, 2),)
    first, second, third = exhaustive.mark(pairs, lambda pair: [pair[0]])
    assert (first, third) == (pairs[0], pairs[2])
    assert second.values == pairs[1]
    assert second.marks
