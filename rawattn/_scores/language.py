"""The expression dialect: a text in Python's syntax, checked and typed. Anything that is not listed here is refused."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from rawattn._scores.expression import (
    BOOL,
    FLOAT,
    INT,
    POSITION,
    SCORE,
    Expression,
    apply,
    balanced,
    common_type,
    const,
    converted,
    depth_of_balanced,
    position,
)

# Functions of one float.
MATHS = ("exp", "log", "tanh", "sin", "cos", "sqrt")
FUNCTIONS = (*MATHS, "abs", "floor", "min", "max", "where", "int", "float")
# Names that captured arrays and numbers may not have.
RESERVED = frozenset({"score", "inf", *POSITION, *FUNCTIONS})

ACCEPTED = (
    "numbers, + - * / // % **, comparisons, and/or/not, `a if c else b`, subscripts of captured arrays, and "
    + ", ".join(FUNCTIONS)
)
MAX_POWER = 64  # the largest exponent of an int
_MAX_DEPTH = 200
_MAX_CHARACTERS = 20_000
_INT32 = 2**31
# Names that FlexAttention and its users give to positions, and this dialect's names for them: for hints in errors.
_ELSEWHERE = {
    **{
        "b": "batch",
        "h": "head",
        "q": "q_idx",
        "k": "kv_idx",
        "kv": "kv_idx",
        "i": "q_idx",
        "j": "kv_idx",
    },
    **{
        "scores": "score",
        "s": "score",
        "k_idx": "kv_idx",
        "head_idx": "head",
        "batch_idx": "batch",
    },
}
# Functions of NumPy, torch and C, and how this dialect writes them: for hints in errors.
_FUNCTIONS_ELSEWHERE = {
    **dict.fromkeys(("pow", "power"), "x ** 2"),
    **dict.fromkeys(("minimum", "fmin"), "min(...)"),
    **dict.fromkeys(("maximum", "fmax"), "max(...)"),
    **dict.fromkeys(("fabs", "absolute"), "abs(...)"),
    **dict.fromkeys(("clip", "clamp"), "min(max(x, low), high)"),
    "sigmoid": "1 / (1 + exp(-x))",
    "relu": "max(x, 0)",
    "exp2": "exp(x * log(2))",
}
# Signs of C in a text that is not Python's, and what Python has for them.
_SIGNS_ELSEWHERE = {"&&": "and", "||": "or", "?": "a if c else b"}

_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
    ast.NotEq: "ne",
}
_BITWISE = {ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "!="}


class Names(NamedTuple):
    """The captured names that a text may use. scalars: the type of each."""

    arrays: Mapping[str, Array]
    scalars: Mapping[str, str]


class Array(NamedTuple):
    position: int
    type: str
    rank: int


def parse(argument: str, text: str, names: Names, *, has_score: bool) -> Expression:
    """The expression of a text, of any type. argument: the name of the text in errors.

    Raises ValueError, which shows the piece of the text that is not accepted.
    """
    if "#" in text:
        raise ValueError(
            f"{argument}: got a text with `#`, expected one without comments: its lines are joined"
        )
    line = normalised(text)
    if len(line) > _MAX_CHARACTERS:
        raise ValueError(
            f"{argument}: got a text of {len(line)} characters, expected at most {_MAX_CHARACTERS}"
        )
    try:
        tree = ast.parse(line, mode="eval")
    except SyntaxError as error:
        column = error.offset - 1 if error.offset else len(line)  # 0 where the text ends too early
        instead = next((name for sign, name in _SIGNS_ELSEWHERE.items() if sign in line), None)
        hint = f"; write `{instead}`" if instead else ""
        raise ValueError(
            f"{argument}: {error.msg}, expected one expression{hint}\n  {line}\n  {' ' * column}^"
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"{argument}: the text cannot be parsed: {error}") from None
    return _Checker(argument, line, names, has_score)(tree.body, 0)


def normalised(text: str) -> str:
    """The text on one line, so that texts which differ in white space alone share a kernel."""
    return " ".join(text.split())


def number(argument: str, expression: Expression) -> Expression:
    """The expression as a float, which a score text must give. ValueError for a bool."""
    if expression.type == BOOL:
        raise ValueError(
            f"{argument}: the text gives a bool, expected a number; to hide keys write "
            "`where(condition, score, -inf)`"
        )
    return converted(expression, FLOAT)


def truth(argument: str, expression: Expression) -> Expression:
    """The expression, which a predicate must give as a bool. ValueError for another type."""
    if expression.type != BOOL:
        raise ValueError(
            f"{argument}: the text gives {_article(expression)}, expected a bool, True where a key is "
            "seen; compare, as in `x > 0`"
        )
    return expression


class _Checker:
    def __init__(self, argument: str, line: str, names: Names, has_score: bool) -> None:
        self._argument, self._line, self._names = argument, line, names
        self._has_score = has_score
        self._cases: dict[type[ast.expr], Callable[..., Expression]] = {
            ast.Constant: self._constant,
            ast.Name: self._name,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._binary,
            ast.BoolOp: self._logical,
            ast.Compare: self._compare,
            ast.IfExp: self._conditional,
            ast.Call: self._call,
            ast.Subscript: self._subscript,
        }

    def __call__(self, node: ast.expr, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"{self._argument}: the text nests more than {_MAX_DEPTH} operations in one another"
            )
        case = self._cases.get(type(node))
        if case is None:
            hint = ""
            if isinstance(node, ast.Attribute) and self._is_known(node.attr):
                hint = f"; write `{node.attr}` alone"
            self._refuse(node, f"{type(node).__name__}; accepted are {ACCEPTED}{hint}")
        return case(node, depth + 1)

    def _refuse(self, node: ast.AST, why: str) -> NoReturn:
        piece = ast.get_source_segment(self._line, node) or self._line
        raise ValueError(f"{self._argument}: got `{piece}`, {why}")

    def _constant(self, node: ast.Constant, depth: int) -> Expression:
        value = node.value
        if not isinstance(value, (bool, int, float)):
            hint = "; write `inf`" if isinstance(value, str) and "inf" in value else ""
            self._refuse(
                node, f"{type(value).__name__}; accepted are numbers, True and False{hint}"
            )
        if isinstance(value, int) and not -_INT32 <= value < _INT32:
            self._refuse(node, f"but integers have 32 bits; write {value}.0 for a float")
        return const(value)

    def _name(self, node: ast.Name, depth: int) -> Expression:
        name = node.id
        if name == "score" and self._has_score:
            return SCORE
        if name in POSITION:
            return position(name)
        if name == "inf":
            return const(math.inf)
        if name in self._names.scalars:
            index = list(self._names.scalars).index(name)
            return Expression("scalar", self._names.scalars[name], (), index)
        if name in self._names.arrays:
            rank = self._names.arrays[name].rank
            indices = ", ".join(("q_idx", "kv_idx")[-rank:] if rank <= 2 else ["..."] * rank)
            self._refuse(node, f"an array, expected one of its elements, as `{name}[{indices}]`")
        if name in FUNCTIONS:
            self._refuse(node, f"a function, expected its call, as `{name}(...)`")
        if name == "score":
            self._refuse(node, "but a predicate has no score; known are " + self._known())
        hint = f"; write `{_ELSEWHERE[name]}`" if name in _ELSEWHERE else ""
        self._refuse(node, f"which is unknown; known are {self._known()}{hint}")

    def _is_known(self, name: str) -> bool:
        if name == "score":
            return self._has_score
        return name in RESERVED or name in self._names.arrays or name in self._names.scalars

    def _known(self) -> str:
        own = ("score",) if self._has_score else ()
        captured = (*self._names.arrays, *self._names.scalars)
        return ", ".join((*own, *POSITION, "inf", *captured))

    def _unary(self, node: ast.UnaryOp, depth: int) -> Expression:
        if isinstance(node.op, ast.Invert):
            self._refuse(node, "`~`; write `not`")
        literal = getattr(node.operand, "value", None)
        if isinstance(node.op, ast.USub) and type(literal) is int and literal == _INT32:
            return const(-_INT32)  # Python parses -2**31 as minus 2**31, which int32 cannot hold
        x = self(node.operand, depth)
        if isinstance(node.op, ast.Not):
            return apply("not", self._condition(node.operand, x))
        x = converted(x, common_type((x,), INT))
        # The negation of the lowest int wraps around to itself.
        if isinstance(node.op, ast.UAdd) or x == const(-_INT32):
            return x
        return const(-x.value) if x.op == "const" else apply("neg", x)

    def _binary(self, node: ast.BinOp, depth: int) -> Expression:
        if isinstance(node.op, ast.Pow):
            return self._power(node, depth)
        op = _ARITHMETIC.get(type(node.op))
        if op is None:
            instead = _BITWISE.get(type(node.op))
            hint = f"; write `{instead}`" if instead else ""
            self._refuse(node, f"{type(node.op).__name__}; accepted are + - * / // % **{hint}")
        x, y = self(node.left, depth), self(node.right, depth)
        kind = common_type((x, y), FLOAT if op == "div" else INT)
        if kind == INT and op in ("floordiv", "mod") and y == const(0):
            self._refuse(node, "a division of integers by 0")
        return apply(op, converted(x, kind), converted(y, kind))

    def _power(self, node: ast.BinOp, depth: int) -> Expression:
        x, exponent = self(node.left, depth), self(node.right, depth)
        if exponent.op != "const" or exponent.type == BOOL or not math.isfinite(exponent.value):
            self._refuse(
                node,
                "a power; accepted as an exponent is a number written out, as in `x ** 2`; another power is `exp(y * log(x))`",
            )
        n = exponent.value
        x = converted(x, common_type((x, exponent), INT))
        if x.type == INT and n < 0:
            x = converted(x, FLOAT)
        if x.type == INT and n > MAX_POWER:
            self._refuse(node, f"a power of an int; accepted are exponents up to {MAX_POWER}")
        return Expression("pow", x.type, (x,), n)

    def _logical(self, node: ast.BoolOp, depth: int) -> Expression:
        op = "and" if isinstance(node.op, ast.And) else "or"
        depth += depth_of_balanced(len(node.values)) - 1  # of which `depth` has counted one
        return balanced(op, [self._condition(x, self(x, depth)) for x in node.values])

    def _condition(self, node: ast.expr, x: Expression) -> Expression:
        if x.type != BOOL:
            self._refuse(node, f"{_article(x)}, expected a bool here; compare, as in `x != 0`")
        return x

    def _compare(self, node: ast.Compare, depth: int) -> Expression:
        depth += depth_of_balanced(len(node.ops))
        operands = [self(x, depth) for x in (node.left, *node.comparators)]
        pairs = []
        for n, operator in enumerate(node.ops):
            op = _COMPARISONS.get(type(operator))
            if op is None:
                self._refuse(node, f"{type(operator).__name__}; accepted are < <= > >= == !=")
            x, y = operands[n : n + 2]
            kind = common_type((x, y), INT)
            pairs.append(Expression(op, BOOL, (converted(x, kind), converted(y, kind))))
        return balanced("and", pairs)

    def _conditional(self, node: ast.IfExp, depth: int) -> Expression:
        return self._where((node.test, node.body, node.orelse), depth)

    def _where(self, nodes: Sequence[ast.expr], depth: int) -> Expression:
        condition, x, y = (self(each, depth) for each in nodes)
        kind = common_type((x, y))
        choices = (converted(x, kind), converted(y, kind))
        return Expression("where", kind, (self._condition(nodes[0], condition), *choices))

    def _call(self, node: ast.Call, depth: int) -> Expression:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name in self._names.arrays:
            self._refuse(node, f"a call of an array; index it with brackets, as in `{name}[...]`")
        if name is None or name not in FUNCTIONS:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else name or ""
            own = f"{called}(...)" if called in FUNCTIONS else None
            instead = _FUNCTIONS_ELSEWHERE.get(called, own)
            hint = f"; write `{instead}`" if instead else ""
            self._refuse(node, f"an unknown function; known are {', '.join(FUNCTIONS)}{hint}")
        if node.keywords:
            self._refuse(node, "a call with keywords; arguments are given by position")
        wanted = {"where": "3", "min": "2 or more", "max": "2 or more"}.get(name, "1")
        count = len(node.args)
        if count < 2 if wanted == "2 or more" else str(count) != wanted:
            self._refuse(node, f"{name} of {count} arguments, expected {wanted}")
        if name == "where":
            return self._where(node.args, depth)
        # min and max nest to the left: with a NaN among the operands, other trees have other derivatives.
        above = (max(count - max(n, 1) - 1, 0) for n in range(count))
        args = tuple(self(x, depth + more) for x, more in zip(node.args, above, strict=True))
        if name in MATHS or name == "float":
            x = converted(args[0], FLOAT)
            return x if name == "float" else apply(name, x)
        if name == "int":
            return converted(args[0], INT)
        kind = common_type(args, INT)
        first, *others = (converted(x, kind) for x in args)
        if name == "floor":
            return first if kind == INT else apply("floor", first)
        if name == "abs":
            return apply("abs", first)
        for x in others:
            first = apply(name, first, x)
        return first

    def _subscript(self, node: ast.Subscript, depth: int) -> Expression:
        name = node.value.id if isinstance(node.value, ast.Name) else None
        if name is None or name not in self._names.arrays:
            arrays = ", ".join(self._names.arrays) or "none, pass them as keywords of their names"
            self._refuse(node, f"expected an element of a captured array; captured are {arrays}")
        array = self._names.arrays[name]
        several = isinstance(node.slice, ast.Tuple)
        nodes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(nodes) != array.rank or (several and array.rank == 1):
            axes = f"{array.rank} {'axis' if array.rank == 1 else 'axes'}"
            self._refuse(
                node, f"{len(nodes)} indices of an array of {axes}, expected as many as axes"
            )
        indices = []
        for each in nodes:
            index = self(each, depth)
            if index.type == FLOAT:
                self._refuse(each, "a float, expected an int as an index; write `int(...)`")
            indices.append(converted(index, INT))
        return Expression("load", array.type, tuple(indices), array.position)


def _article(x: Expression) -> str:
    return "an int" if x.type == INT else f"a {x.type}"
