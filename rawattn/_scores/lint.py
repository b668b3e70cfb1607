"""What a text in CUDA may not hold. It keeps mistakes out, not an attacker: such a text is code of the program."""

from __future__ import annotations

import re

from rawattn._scores.program import ScoreText

# Pieces that reach beyond the function, each with what it is.
_REFUSED = (
    (r"#|%:|\?\?=", "a preprocessor directive"),
    (r"\b(?:__)?asm(?:__)?\b", "assembly"),
    (r"\b__\w+__\b", "a function attribute or built-in macro"),
    (r"\b_Pragma\b", "a pragma"),
    (r"[\"']", "a quote"),
    (r"\\", "a backslash"),
    (r"\breturn\b", "a return: assign the variable"),
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
# What C++ or the text around has for itself.
_KEYWORDS = """
    alignas alignof and_eq asm at auto bitand bitor bool case catch char compl config const constexpr const_cast
    decltype default delete do double dscore dynamic_cast enum explicit export extern float float16 bfloat16 for friend
    goto inline int int64 long mutable namespace new noexcept not_eq nullptr operator or_eq p private protected public
    register reinterpret_cast short signed sizeof static static_assert static_cast struct switch target template this
    thread_local throw typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""


def check(text: ScoreText) -> None:
    """Of a text with language="cuda". Raises ValueError naming the argument, the line and what is refused."""
    names = (*(name for name, *_ in text.arrays), *(name for name, _ in text.scalars))
    for name in names:
        if name in _KEYWORDS.split() or "__" in name:
            raise ValueError(
                f"score_mod: got a captured {name!r}, which C++ or the text around has for itself; capture it by another name"
            )
    for argument, variable, piece in (
        ("score_mod", "score", text.forward),
        ("backward", "dscore", text.backward),
    ):
        if piece is not None:
            _check(argument, piece)
            if not re.search(rf"\b{variable}\s*[-+*/]?=(?!=)", piece):
                raise ValueError(
                    f"{argument}: the text assigns no `{variable}`, expected statements as in `{variable} = 2.0f * "
                    f"{variable};`"
                )


def _check(argument: str, piece: str) -> None:
    for pattern, what in _REFUSED:
        if match := re.search(pattern, piece):
            line = piece.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"{argument}: got `{match[0]}` in line {line}, {what}, which is not accepted"
            )
    opened: list[str] = []
    for character in re.sub(r"//[^\n]*|/\*.*?\*/", "", piece, flags=re.DOTALL):
        if character in "([{":
            opened.append(character)
        elif character in _PAIRS and (not opened or opened.pop() != _PAIRS[character]):
            raise ValueError(f"{argument}: got a `{character}` without its `{_PAIRS[character]}`")
    if opened:
        raise ValueError(f"{argument}: got a `{opened[-1]}` that is not closed")
    if "/*" in re.sub(r"/\*.*?\*/", "", piece, flags=re.DOTALL):
        raise ValueError(f"{argument}: got a comment that is not closed")
