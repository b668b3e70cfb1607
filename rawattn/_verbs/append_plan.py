"""A plan of `append_kv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rawattn._call.rotary import split
from rawattn._verbs.append import WRITTEN, check_rows, read_append
from rawattn._verbs.paged import check_pages
from rawattn._verbs.plan import Plan
from rawattn._verbs.plan_arguments import host_table

_BY_POSITION = 5  # k, v, k_pages, v_pages, block_table


class AppendPlan(Plan):
    """A `Plan` that takes its arrays in the order of `append_kv`: ``Plan(k, v, k_pages, v_pages, block_table, q=q)``.

    A call may also pass other angles, as ``rotary=`` or as ``cos=`` and ``sin=``, and other scales if these are arrays.
    """

    def __init__(self, **named: Any) -> None:
        call = read_append(**named)
        returned = _first if call.targets else _nothing
        table = call.inputs[call.verb.inputs.index("block_table")]
        super().__init__(
            *(*call[:4], False, named["backend"], returned, call.values),
            host_table(named["block_table"], table),
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The turned queries, or None without queries."""
        if len(args) > _BY_POSITION:
            raise TypeError(
                f"plan: got {len(args)} arrays by position, expected k, v, k_pages, v_pages, block_table; others by name, as "
                "in q="
            )
        if "q" in self._verb.inputs and len(args) == _BY_POSITION:
            q = named.pop("q", self._inputs[_BY_POSITION - 1])
            args = (*args[:-1], q, args[-1])
        if named:
            if "rotary" in named and "cos" in self._verb.inputs:
                cos, sin = split(named.pop("rotary"))
                return super().__call__(*args, cos=cos, sin=sin, **named)
            return super().__call__(*args, **named)
        if len(args) == len(self._inputs):
            return super().__call__(*args)
        return super().__call__(*args, *self._inputs[len(args) :])

    def _outputs_to_write(self, out: Any, into: Any) -> Sequence[Any]:
        if out is not None and not self._verb.outputs:
            raise TypeError(
                "out: got an array, but this plan has no q, of which alone there are results; leave it out, or plan with q="
            )
        return super()._outputs_to_write(out, into)

    def _check_table(self, named: Mapping[str, Any]) -> None:
        k, k_pages, v_pages, table = (
            named[name] for name in ("k", "k_pages", "v_pages", "block_table")
        )
        layout = self._options.seqs
        check_pages(k, k_pages, v_pages, table, layout, WRITTEN)
        check_rows(k, k_pages, table, layout, named.get("cos"))


def _first(results: Any) -> Any:
    return results[0]


def _nothing(results: Any) -> None:
    return None
