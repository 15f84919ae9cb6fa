"""Arithmetic in a string, such as ``sqrt(2*lr*T/N)``, worked out without `eval`: numbers, names, + - * / **, sqrt."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

LONGEST = 200  # characters; no noise rule needs more
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[[float], float]] = {"sqrt": math.sqrt, "exp": math.exp, "log": math.log}


class Refused(ValueError):
    """An expression that is not understood, or that uses what was not given."""


def evaluate(expression: float | str, names: Mapping[str, float | None], what: str = "the expression") -> float:
    """The value of an arithmetic expression.

    Args:
        expression: a number, or text of numbers, ``names``, ``+ - * / **``, brackets, sqrt, exp and log.
        names: what names stand for; None for one that is understood but was not given.
        what: what the value is, for messages.

    Raises:
        ValueError: the text is no such expression, or it has no finite value.

    Example:
        >>> evaluate("sqrt(2*lr/N)", {"lr": 0.02, "N": 100})
        0.02
        >>> evaluate("__import__('os')", {})
        Traceback (most recent call last):
        ...
        isosgd.diagnostics.auditing.expressions.Refused: the expression = "__import__('os')": __import__(...) is not ...
    """
    value = _text(expression, names, what) if isinstance(expression, str) else _number(expression, what)
    if not math.isfinite(value):
        raise ValueError(f"{what} = {expression!r} comes to {value}, which is not finite")
    return value


def _number(value: float, what: str) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{what} = {value} must be a number or an expression such as 'sqrt(2*lr*T/N)'")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} = {value!r} must be a number or an expression such as 'sqrt(2*lr*T/N)'") from error


def _text(text: str, names: Mapping[str, float | None], what: str) -> float:
    if len(text) > LONGEST:
        raise ValueError(f"{what} has {len(text)} characters; at most {LONGEST} are read")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{what} = {text!r} is no arithmetic expression; write e.g. 'sqrt(2*lr*T/N)'") from error

    def refuse(found: str) -> Refused:
        known = ", ".join((*sorted(_FUNCTIONS), *sorted(names)))
        return Refused(f"{what} = {text!r}: {found} is not understood; use numbers, + - * / **, brackets, {known}")

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return float(number)
            case ast.Name(id=name) if name in names:
                known = names[name]
                if known is None:
                    raise Refused(f"{what} = {text!r} uses {name}, which was not given")
                return known
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](value(left), value(right))
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
                return _UNARY[type(sign)](value(operand))
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](value(argument))
            case ast.BinOp(op=ast.BitXor()):
                raise refuse("^ (a power is **)")
            case ast.Call(func=called):
                raise refuse(f"{ast.unparse(called)}(...)")
        raise refuse(ast.unparse(node))

    try:
        found = value(tree)
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{what} = {text!r} has no finite value here: {error}") from error
    except Refused:
        raise
    except ValueError as error:  # of the functions of math
        raise ValueError(f"{what} = {text!r} takes a root or logarithm of a number that has none") from error
    if isinstance(found, complex):  # a negative number to a broken power
        raise ValueError(f"{what} = {text!r} takes a root or logarithm of a number that has none")
    return found
