"""A score text as C++: a struct in namespace `config`, placed before the kernel's file.

Kernels call its members. Each is a template over the parameter struct P, whose field `captured` holds the captured arrays and
numbers:

    struct ScoreMod {
      static constexpr bool kAdditive;    // the derivative is 1 wherever a key is seen
      static constexpr bool kNeedsScore;  // derivatives depend on the score as it was before
      static constexpr int kPartials;     // on how many elements of the captured arrays in wrt a score depends
      ScoreMod(const ScorePosition& at, const P& p);  // for one head of one sequence; reads neither q_idx nor kv_idx
      float value(float score, const ScorePosition& at, const P& p);       // -inf hides the key
      float derivative(float score, const ScorePosition& at, const P& p);  // anything where the value is -inf
      int partial_array<n>();                                          // the index of the array
      float partial<n>(float score, const ScorePosition& at, const P& p);
      int64 partial_index<n>(float score, const ScorePosition& at, const P& p);  // index of the element, in C order
      float added(const ScorePosition& at, const P& p);  // if kModLine: value() is score + added()
      float step(const ScorePosition& at, const P& p);   // growth of added() from one key to the next
      float row_step(const ScorePosition& at, const P& p);  // growth to the next query, if both steps depend on the head alone
    };
    struct Predicate { bool holds(const ScorePosition& at, const P& p); };

Values that all scores of a head share are computed once, by the constructor. Compilers would not hoist a load out of the loop
over tiles: it would stay behind the Q K^T product, where every tile waits for it.

Every operation becomes a variable, so that subexpressions which occur twice are computed once. Both branches of a `where` are
computed, so no operation may fail: divisions by zero are defined and indices are clamped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from rawattn._scores.derive import mentions
from rawattn._scores.expression import (
    BOOL,
    FLOAT,
    INT,
    KEY,
    POSITION,
    QUERY,
    SCORE,
    Expression,
    position,
    walk,
)
from rawattn._scores.position_sums import sum_of_positions, with_early_floats
from rawattn._scores.program import Partial, ScoreText, line_of, predicate, program
from rawattn._scores.score_mod import require_float32

_INCLUDES = """\
#include "attn/captured.cuh"
#include "attn/score_maths.cuh"
#include "attn/score_position.cuh"
"""
_ELEMENTS = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "int32": "int",
    "int64": "int64",
    "bool": "bool",
}
_INFIX = {
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and": "&&",
    "or": "||",
}
# Unsigned integers round towards 0 as Python's round down, in a third of the instructions.
_OF_NATURAL = {"floordiv": "/", "mod": "%"}
_OF_FLOATS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_TARGET = frozenset({"sin", "cos", "sqrt", "floor"})
_MATHS = frozenset({"exp", "log", "tanh"})
_LEAST = float(np.finfo(np.float32).tiny)
_POWERS = 16  # the largest integer exponent of a float that is computed by multiplications
_MAX_SHARED = 4  # the most values per head that a kernel keeps in registers across tiles
_PER_SCORE_LEAVES = frozenset({SCORE, *(position(name) for name in ("q_idx", "kv_idx"))})
_NO_BACKWARD = "a score function in CUDA without backward has no derivative"
_FILES = {"score_mod": "forward", "score_mod.backward": "backward"}
# "score_mod(2): error: ..." of NVRTC, "score_mod:2:7: error: ..." of g++
_AT_LINE = re.compile(
    r"^(score_mod(?:\.backward)?)(?:\((\d+)\)|:(\d+)(?::\d+)?):? *(?:catastrophic )?((?:fatal )?error|warning)(.*)$"
)


def device_text(text: ScoreText, *, exact: bool) -> str:
    """The struct `config::ScoreMod` for a score text in either language.

    exact: whether functions are as exact as float32, or quicker and exact enough for scores of 16-bit elements.
    A CUDA text without a `backward` has no derivative: a kernel that calls `derivative` does not compile.
    """
    require_float32(text)
    members = _of_expression(text) if text.language == "expression" else _of_cuda(text)
    return _struct("ScoreMod", members, exact)


def predicate_text(text: ScoreText) -> str:
    """The struct `config::Predicate` for a predicate's text."""
    require_float32(text)
    body = _body(text, (predicate(text),))
    lines = [*body.lines, f"return {body.results[0]};"]
    holds = _function("static bool holds", "", lines, constant=False)
    return _struct("Predicate", [holds], exact=True)


def compile_error_message(log: str, text: ScoreText) -> str:
    """The errors in a compiler's log that lie in the user's own lines, the first of each line; "" if there are none."""
    messages: dict[tuple[str, int], str] = {}
    for line in log.splitlines():
        match = _AT_LINE.match(line.strip())
        if match is None or match[4] == "warning":
            continue
        argument = _FILES[match[1]]
        lines = (getattr(text, argument) or "").split("\n")
        number = int(match[2] or match[3])
        users = f"\n    {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
        messages.setdefault(
            (argument, number), f"  {argument}, line {number}:{match[5].lstrip(':')}{users}"
        )
    if not messages:
        return ""
    return "\n".join(["score_mod: the text does not compile", *messages.values()])


def _of_expression(text: ScoreText) -> list[str]:
    whole = program(text)
    # The members of a line are written also if the text is a line under `causal` only. Kernels call them only if kModLine.
    steps = [each for each in line_of(text, causal=True) or () if each is not None]
    straight = tuple(map(with_early_floats, steps))
    value, derivative = map(with_early_floats, (whole.value, whole.derivative))
    partials = tuple(each._replace(value=with_early_floats(each.value)) for each in whole.partials)
    shared = shared_by_head((value, derivative, *(each.value for each in partials), *straight))
    names = {node: f"shared{n}" for n, node in enumerate(shared)}
    body = _body(text, (value,), names)
    members = [
        f"static constexpr bool kAdditive = {str(whole.additive).lower()};",
        f"static constexpr bool kNeedsScore = {str(whole.needs_score).lower()};",
        f"static constexpr int kPartials = {len(whole.partials)};",
        *_shared(text, shared),
        _function("float value", "float score, ", [*body.lines, f"return {body.results[0]};"]),
    ]
    body = _body(text, (derivative,), names)
    lines = [*body.lines, f"return {body.results[0]};"]
    members.append(_function("float derivative", "float score, ", lines))
    for name, root in zip(("added", "step", "row_step"), straight, strict=False):
        body = _body(text, (root,), names)
        members.append(_function(f"float {name}", "", [*body.lines, f"return {body.results[0]};"]))
    return members + _partials(text, partials, names)


def shared_by_head(roots: Iterable[Expression]) -> tuple[Expression, ...]:
    """The largest subexpressions that are the same for all scores of a head, at most `_MAX_SHARED`, in the order of the roots.

    Positions, captured floats and literal numbers are left out: they cost nothing where they are used.
    """
    own: dict[Expression, bool] = {}  # whether it differs from score to score
    found: dict[Expression, None] = {}
    for root in roots:
        for node in walk(root):
            own[node] = node in _PER_SCORE_LEAVES or any(own[x] for x in node.args)
            if own[node]:
                found.update((x, None) for x in node.args if not own[x] and _costs(x))
        if not own[root] and _costs(root):
            found[root] = None
    return tuple(found)[:_MAX_SHARED]


def _costs(node: Expression) -> bool:
    return node.op not in ("const", "position") and (node.op, node.type) != ("scalar", FLOAT)


def _shared(text: ScoreText, shared: tuple[Expression, ...]) -> list[str]:
    """The constructor, and the data members that it sets."""
    body = _body(text, shared)
    sets = [f"shared{n} = {value};" for n, value in enumerate(body.results)]
    return [
        *(f"{node.type} shared{n};" for n, node in enumerate(shared)),
        _function("ScoreMod", "", [*body.lines, *sets], constant=False),
    ]


def _partials(
    text: ScoreText, partials: tuple[Partial, ...], names: Mapping[Expression, str]
) -> list[str]:
    arrays, values, indices = ["return -1;"], ["return 0.0f;"], ["return -1;"]
    for n, each in enumerate(partials):
        arrays = _branch(n, [f"return {each.array};"], arrays)
        body = _body(text, (each.value,), names)
        values = _branch(n, [*body.lines, f"return {body.results[0]};"], values)
        body = _body(text, each.indices, names)
        element = ", ".join((f"p.captured.array{each.array}", *body.results))
        indices = _branch(n, [*body.lines, f"return captured_number({element});"], indices)
    return [
        "\n".join(
            [
                "template <int n>",
                "DEVICE static constexpr int partial_array() {",
                *_indented(arrays),
                "}",
            ]
        ),
        _function("float partial", "float score, ", values, "int n, "),
        _function("int64 partial_index", "float score, ", indices, "int n, "),
    ]


def _branch(n: int, lines: list[str], others: list[str]) -> list[str]:
    return [f"if constexpr (n == {n}) {{", *_indented(lines), "} else {", *_indented(others), "}"]


def _of_cuda(text: ScoreText) -> list[str]:
    names = [f"const int {name} = at.{name};" for name in POSITION]
    names.append("const float inf = target::infinity();")
    for n, (name, kind) in enumerate(text.scalars):
        names.append(f"const {kind} {name} = {_scalar(n, kind)};")
    for n, (name, _, _) in enumerate(text.arrays):
        names.append(f"const CapturedArray<{_element(text, n)}> {name}{{p.captured.array{n}}};")
    names = [f"[[maybe_unused]] {line}" for line in names]
    members = [
        "static constexpr bool kAdditive = false;",
        "static constexpr bool kNeedsScore = true;",
        "static constexpr int kPartials = 0;",
        *_shared(text, ()),
        _function(
            "float value",
            "float score, ",
            [*names, *_user_lines("score_mod", text.forward), "return score;"],
        ),
    ]
    if text.backward is None:
        lines = [f'static_assert(sizeof(P) == 0, "{_NO_BACKWARD}");', "return 0.0f;"]
    else:
        backward = _user_lines("score_mod.backward", text.backward)
        lines = [*names, "float dscore = 1.0f;", *backward, "return dscore;"]
    members.append(_function("float derivative", "const float score, ", lines))
    return members + _partials(text, (), {})


def _user_lines(file: str, text: str) -> list[str]:
    """The user's lines unchanged, with a `#line` directive, so that a compiler's messages name them by `file` and line.

    A semicolon, counted as of the last line, ends what the text leaves open: `if (x)` would take in the statement behind it.
    """
    last = text.count("\n") + 1
    return [f'#line 1 "{file}"', text, f'#line {last} "{file}"', ";", '#line 1 "generated"']


class _Body:
    def __init__(self, lines: list[str], results: list[str]) -> None:
        self.lines, self.results = lines, results


def _body(
    text: ScoreText,
    expressions: Iterable[Expression],
    known: Mapping[Expression, str] | None = None,
) -> _Body:
    """Statements that compute the expressions, and the names of the results. known: names of expressions already computed."""
    names = dict(known or {})
    lines: list[str] = []
    roots = tuple(expressions)
    for root in roots:
        for node in walk(root, names):
            if node in names:
                continue
            value = _cpp_of(text, node, [names[x] for x in node.args])
            if node.op in ("const", "score", "position"):
                names[node] = value
            else:
                names[node] = f"x{len(lines)}"
                lines.append(f"const {node.type} {names[node]} = {value};")
    return _Body(lines, [names[root] for root in roots])


def _cpp_of(text: ScoreText, node: Expression, args: list[str]) -> str:
    if node.op == "const":
        return _number(node)
    if node.op == "score":
        return "score"
    if node.op == "position":
        return f"at.{node.value}"
    if node.op == "scalar":
        return _scalar(node.value, node.type)
    if node.op == "load":
        given = ", ".join((f"p.captured.array{node.value}", *args))
        return f"captured_at<{_element(text, node.value)}>({given})"
    if node.op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if node.op == "not":
        return f"!{args[0]}"
    if node.op == "pow":
        return _power(node, args[0])
    if node.op == "to_int":
        return (
            f"int({args[0]})" if node.args[0].type == BOOL else f"score_maths::saturated({args[0]})"
        )
    if node.op == "to_float":
        return _to_float(node.args[0], args[0])
    if node.op in _INFIX:
        return f"{args[0]} {_INFIX[node.op]} {args[1]}"
    if node.op in _OF_NATURAL and _is_natural(node):
        return f"int(unsigned({args[0]}) {_OF_NATURAL[node.op]} {node.args[1].value}u)"
    if (node.op, node.type) == ("div", FLOAT) and mentions(node, SCORE):
        return _quotient(node.args[1], *args)
    if node.type == FLOAT and node.op in _OF_FLOATS:
        return f"{args[0]} {_OF_FLOATS[node.op]} {args[1]}"
    if node.type == FLOAT and node.op == "neg":
        return f"-{args[0]}"
    space = "target" if node.op in _TARGET else "maths" if node.op in _MATHS else "score_maths"
    return f"{space}::{node.op}({', '.join(args)})"


def _is_natural(node: Expression) -> bool:
    """Whether an int is never negative: a position, or its quotient or remainder of a positive number."""
    if node.op == "position":
        return True
    if node.type != INT or node.op not in _OF_NATURAL:
        return False
    dividend, divisor = node.args
    return divisor.op == "const" and divisor.value > 0 and _is_natural(dividend)


def _element(text: ScoreText, index: int) -> str:
    """The template arguments of a captured array: the type of its elements, and whether it is wide."""
    name, dtype, _ = text.arrays[index]
    return f"{_ELEMENTS[dtype]}, {str(name in text.wide).lower()}"


def _quotient(divisor: Expression, x: str, y: str) -> str:
    """A division that depends on the score. One of positions alone is always exact: its floor may be the number of a block."""
    if divisor.op != "const":
        return f"maths::div({x}, {y})"
    if divisor.value and _LEAST <= abs(1.0 / divisor.value) <= 1.0 / _LEAST:
        return f"maths::div({x}, {y}, {_float(1.0 / divisor.value)})"
    return f"{x} / {y}"


def _to_float(node: Expression, x: str) -> str:
    """The conversion of an int to float. A sum of positions is split in two: the value at the lane's first score, which all of
    the lane's scores share and which is converted once, and an offset, which is a constant to the compiler.
    """
    form = sum_of_positions(node) or {}
    more = {"at.q_static": form.get(QUERY, 0), "at.kv_static": form.get(KEY, 0)}
    terms = [f"({n}) * {name}" for name, n in more.items() if n]
    return f"score_maths::float_of({x}, {' + '.join(terms)})" if terms else f"float({x})"


def _power(node: Expression, x: str) -> str:
    n = node.value
    if node.type == INT or (float(n).is_integer() and abs(n) <= _POWERS):
        return f"score_maths::power<{int(n)}>({x})"
    return f"target::pow({x}, {_float(n)})"


def _scalar(index: int, kind: str) -> str:
    """A captured number. Ints and bools are passed as floats too; the host has checked that float32 holds them exactly."""
    value = f"p.captured.scalars[{index}]"
    return {FLOAT: value, INT: f"int({value})", BOOL: f"{value} != 0.0f"}[kind]


def _number(node: Expression) -> str:
    if node.type == FLOAT:
        return _float(node.value)
    if node.type == BOOL:
        return str(node.value).lower()
    if node.value == -(2**31):  # C++ has no such literal
        return f"({node.value + 1} - 1)"
    return str(node.value) if node.value >= 0 else f"({node.value})"


def _float(value: float) -> str:
    with np.errstate(over="ignore"):
        rounded = float(np.float32(value))
    if np.isinf(rounded):
        return "target::infinity()" if rounded > 0 else "(-target::infinity())"
    return f"({rounded!r}f)" if str(rounded).startswith("-") else f"{rounded!r}f"


def _function(
    what: str, first: str, lines: Iterable[str], template: str = "", *, constant: bool = True
) -> str:
    """A member function that takes a position and the parameters. first: arguments that come before these."""
    given = "[[maybe_unused]] const ScorePosition& at, [[maybe_unused]] const P& p"
    head = f"DEVICE {what}({first}{given}){' const' if constant else ''} {{"
    head = head.replace("(float score", "([[maybe_unused]] float score")
    head = head.replace("(const float score", "([[maybe_unused]] const float score")
    return "\n".join([f"template <{template}class P>", head, *_indented(lines), "}"])


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _struct(name: str, members: Iterable[str], exact: bool) -> str:
    lines = (
        *("namespace config {", f"namespace maths = score_maths::{'exact' if exact else 'quick'};"),
        *(f"struct {name} {{", *members, "};", "}  // namespace config"),
    )
    return _INCLUDES + "\n".join(lines) + "\n"
