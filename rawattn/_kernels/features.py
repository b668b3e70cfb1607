"""The features of attention that a call uses, as the named constants that kernels are compiled with.

Configurations of kernels inherit the features, so a new feature is a field here. The families that run all calls of a verb have
it at once. A family without code for it leaves it out of its FEATURES, and is not asked for such calls. A kernel to which it
makes no difference names it in LEAVES_OUT.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from rawattn._call.problem import Problem
from rawattn._kernels.operands import ITEMSIZE, WIDEST, Operands

if TYPE_CHECKING:
    from rawattn._scores.line import Line

# Constants that are not named after their fields by the rule of `constant`.
_SPELLED = {"headdim": "kHeadDim", "headdim_v": "kHeadDimV"}
# Fields that become no constants: the element type and the score function are types, the others follow from the target.
_OF_HOST = ("element", "wave", "accumulator_feeds_a", "score_mod")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The features of a call, all off by default. LEAVES_OUT: those that make no difference to a kernel, which is compiled
    without their constants.
    """

    LEAVES_OUT: ClassVar[frozenset[str]] = frozenset()

    ragged: bool = False  # sequences have lengths of their own
    packed: bool = False  # group mode: the arrays have no batch axis
    left: bool = False  # a window limits the visible keys on the left
    right: bool = False  # a window or the diagonal limits the visible keys on the right
    top_left: bool = False  # the diagonal begins at the first row and key, not at the last ones
    positions: bool = False  # positions of the first rows and keys place the diagonal, or a score function reads them
    scale_first: bool = (
        False  # scores are scaled before the running max, as the scale is not positive
    )
    softcap: bool = False
    bias: int = 0  # bytes of an element of the bias, 0 without one
    bias_pairs: bool = False  # the bias of two keys may be read at once
    bias_chunks: bool = False  # 16 bytes of the bias may be read at once
    alibi: bool = False
    # With ALiBi, or a score function that only adds: no key beyond the diagonal is seen.
    one_sided: bool = False
    score_mod: Hashable = None  # the text of the user's score function
    mod_line: bool = False  # the score function adds what grows evenly from key to key (a line)
    sink_logits: bool = False
    dropout: bool = False
    block_mask: bool = False
    paged: bool = False  # keys and values are in pages
    float8: bool = False  # pages hold 8-bit elements

    @property
    def hides_from_some(self) -> bool:
        """Whether a tile may have keys that only some of its rows see (kHidesFromSome in kernels_cu/attn/alone.cuh)."""
        masks = self.left or self.right or self.block_mask
        return masks or self.bias > 0 or self.score_mod is not None

    def active(self) -> frozenset[str]:
        """The names of the features that are on."""
        return frozenset(name for name in _NAMES if getattr(self, name))

    def known_to(self, config: type[Features]) -> dict[str, bool]:
        """The features that a kernel's configuration has, with their values."""
        return {name: getattr(self, name) for name in _NAMES if name not in config.LEAVES_OUT}


_NAMES = tuple(field.name for field in fields(Features))


def names() -> frozenset[str]:
    """The names of all features."""
    return frozenset(_NAMES)


def features(problem: Problem, operands: Operands | None = None) -> Features:
    """The features that a call uses. Without operands, those that depend on how arrays lie are off."""
    left, right = problem.window_left is not None, problem.window_right is not None
    additive, line = _added(problem)
    return Features(
        ragged=problem.ragged,
        packed=problem.packed,
        left=left,
        right=right,
        # Without a limit on either side and without ALiBi nothing depends on the diagonal, so both alignments share a kernel.
        top_left=problem.top_left and (left or right or problem.alibi_slopes is not None),
        positions=problem.positions
        and (left or right or problem.alibi_slopes is not None or problem.score_mod is not None),
        scale_first=not problem.scale > 0,
        softcap=problem.softcap is not None,
        bias=0 if problem.bias is None else ITEMSIZE[problem.bias.dtype],
        bias_pairs=operands is not None and _reads(problem, operands, 2),
        bias_chunks=operands is not None
        and problem.bias is not None
        and _reads(
            problem,
            operands,
            WIDEST // ITEMSIZE[problem.bias.dtype],
            beyond="bias" in operands.whole_rows,
        ),
        alibi=problem.alibi_slopes is not None,
        one_sided=(problem.alibi_slopes is not None or additive) and problem.window_right == 0,
        score_mod=problem.score_mod,
        mod_line=line is not None,
        sink_logits=problem.sink_logits is not None,
        dropout=problem.dropout_p > 0,
        block_mask=problem.mask is not None,
        paged=problem.pages is not None,
        float8=problem.float8,
    )


def adds_a_plane(problem: Problem) -> bool:
    """Whether what a score function adds grows evenly from key to key, alike for all queries, and from query to query."""
    _, line = _added(problem)
    return line is not None and line.row_step is not None


def _added(problem: Problem) -> tuple[bool, Line | None]:
    """Whether the score function only adds to scores; and its line, where what it adds grows evenly from key to key."""
    if problem.score_mod is None:
        return False, None
    from rawattn._scores.program import ScoreText, line_of, program

    text = problem.score_mod
    assert isinstance(text, ScoreText)
    if text.language != "expression":
        return False, None
    # Both positions are the same on the diagonal, if it begins at the first row and key of the whole sequence.
    whole = not problem.ragged and problem.rows_q == problem.rows_k
    aligned = problem.top_left or problem.positions or whole
    causal = problem.window_right == 0 and aligned
    # Beside these options kernels have no registers for what a line adds to each row.
    alone = problem.softcap is None and problem.bias is None and problem.alibi_slopes is None
    return program(text).additive, line_of(text, causal=causal) if alone else None


def _reads(problem: Problem, operands: Operands, keys: int, *, beyond: bool = False) -> bool:
    """Whether `keys` neighbouring keys of the bias can be read at once: any such group lies at a multiple of its size in bytes.

    beyond: reads may go beyond the keys of a row, as the memory there is the array's.
    """
    form = problem.bias
    if form is None or not form.dense or (form.shape[3] % keys and not beyond):
        return False
    nbytes = keys * ITEMSIZE[form.dtype]
    between = operands.option_strides["bias"][:-1]
    return operands.alignments["bias"] % nbytes == 0 and all(x % nbytes == 0 for x in between)


def constants(config: Features, *properties: str) -> dict[str, int]:
    """The constants of a configuration: its fields, and these of its properties."""
    names = (*(field.name for field in fields(config)), *properties)
    skipped = {*_OF_HOST, *config.LEAVES_OUT}
    found = {constant(name): getattr(config, name) for name in names if name not in skipped}
    if "score_mod" not in config.LEAVES_OUT:
        found["kScoreMod"] = config.score_mod is not None
        found.setdefault("kModLine", False)
    return found


def constant(name: str) -> str:
    """tile_q -> kTileQ"""
    return _SPELLED.get(name) or "k" + "".join(map(str.capitalize, name.split("_")))


def traits(config: Features, leave_out: Iterable[str] = ()) -> list[str]:
    """The words for the features that are on in a configuration, for a kernel's summary."""
    return [
        name.replace("_", "-") for name in _NAMES if getattr(config, name) and name not in leave_out
    ]
