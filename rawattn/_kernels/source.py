"""The translation unit of a kernel: generated constants, the kernel's file, and assertions of its structs' layout."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

from rawattn._compile.compiler import Source
from rawattn._kernels import structs

ELEMENT = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float"}


class Described(Protocol):
    """The fields that the configurations of all attention kernels have."""

    @property
    def headdim(self) -> int: ...
    @property
    def headdim_v(self) -> int: ...


def source(
    entry: str,
    file: str,
    summary: str,
    struct: structs.Struct,
    *,
    element: str | None = None,
    constants: Mapping[str, int] | None = None,
    score_mod: Hashable = None,
) -> Source:
    """The kernel `entry` of a file below kernels_cu, with `constants` in namespace `config`.

    struct: the kernel's first parameter. Every offset in it is asserted, so a struct changed on one side alone does not
    compile.
    element: becomes `config::Element`.
    score_mod: the text of a score function, which becomes `config::ScoreMod`.
    """
    lines = []
    if constants is not None:
        lines += ['#include "target/target.cuh"', "namespace config {"]
        if element is not None:
            lines.append(f"using Element = {element};")
        for name, value in constants.items():
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
        if constants.get("kScoreMod") is False:
            lines.append("struct ScoreMod;")
        lines.append("}  // namespace config")
    if score_mod is not None:
        from rawattn._scores.cuda_text import device_text
        from rawattn._scores.program import ScoreText

        assert isinstance(score_mod, ScoreText)
        lines += [
            '#include "attn/params.cuh"',
            device_text(score_mod, exact=element not in ("float16", "bfloat16")),
        ]
    lines += [f'#include "{file}"', *structs.assertions(struct), ""]
    return Source(entry=entry, text="\n".join(lines), summary=summary)


def dims(config: Described) -> str:
    """The head dims in words, for a kernel's summary."""
    both = config.headdim == config.headdim_v
    return f"D={config.headdim}" if both else f"D={config.headdim},{config.headdim_v}"


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
