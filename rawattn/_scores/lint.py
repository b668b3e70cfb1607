"""Checks of a score text in CUDA. They catch mistakes, not attacks: such a text runs as code of the program."""

from __future__ import annotations

import re

from rawattn._scores.program import ScoreText

# Patterns of code that reaches beyond the function, each with its name in errors.
_REFUSED = (
    (r"#|%:|\?\?=", "a preprocessor directive"),
    (r"\b(?:__)?asm(?:__)?\b", "assembly"),
    (r"\b__\w+__\b", "a function attribute or built-in macro"),
    (r"\b_Pragma\b", "a pragma"),
    (r"[\"']", "a quote"),
    (r"\breturn\b", "a return: assign the variable"),
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# Keywords of C++20, except those that are Python's too.
_KEYWORDS = """
    alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await co_return co_yield
    compl concept const const_cast consteval constexpr constinit decltype default delete do double dynamic_cast enum
    explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq nullptr operator
    or_eq private protected public register reinterpret_cast requires short signed sizeof static static_assert static_cast
    struct switch template this thread_local throw true typedef typeid typename union unsigned using virtual void volatile
    wchar_t xor xor_eq
"""
# Names that the generated code around the text uses.
_AROUND = "at bfloat16 CapturedArray config DEVICE dscore float16 int64 p P ScorePosition target"


def check(text: ScoreText) -> None:
    """Checks a text with language="cuda". ValueError, naming the argument, the line and what is refused."""
    names = (*(name for name, *_ in text.arrays), *(name for name, _ in text.scalars))
    for name in names:
        if name in (*_KEYWORDS.split(), *_AROUND.split()) or "__" in name:
            raise ValueError(
                f"score_mod: got a captured {name!r}, which C++ or the text around has for itself; capture it by another name"
            )
    for argument, variable, piece in (
        ("score_mod", "score", text.forward),
        ("backward", "dscore", text.backward),
    ):
        if piece is not None:
            code = _without_comments(argument, piece)
            _check(argument, code)
            if not re.search(rf"\b{variable}\s*[-+*/]?=(?!=)", code):
                raise ValueError(
                    f"{argument}: the text assigns no `{variable}`, expected statements as in `{variable} = 2.0f * "
                    f"{variable};`"
                )


def _without_comments(argument: str, piece: str) -> str:
    """The text without comments, with the same number of lines."""
    # A backslash at the end of a line would join the next line to a comment.
    _refuse(argument, piece, r"\\", "a backslash")
    code = _COMMENT.sub(lambda comment: " " + "\n" * comment[0].count("\n"), piece)
    if "/*" in code:
        raise ValueError(f"{argument}: got a comment that is not closed")
    return code


def _refuse(argument: str, piece: str, pattern: str, what: str) -> None:
    if match := re.search(pattern, piece):
        line = piece.count("\n", 0, match.start()) + 1
        raise ValueError(
            f"{argument}: got `{match[0]}` in line {line}, {what}, which is not accepted"
        )


def _check(argument: str, code: str) -> None:
    for pattern, what in _REFUSED:
        _refuse(argument, code, pattern, what)
    opened: list[str] = []
    for character in code:
        if character in "([{":
            opened.append(character)
        elif character in _PAIRS and (not opened or opened.pop() != _PAIRS[character]):
            raise ValueError(f"{argument}: got a `{character}` without its `{_PAIRS[character]}`")
    if opened:
        raise ValueError(f"{argument}: got a `{opened[-1]}` that is not closed")
