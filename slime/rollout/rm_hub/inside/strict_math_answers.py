"""Inside the sandbox: whether sympy simplifies the difference of two answers to zero.

Answers are parsed here, by a grammar of numbers, letters, brackets, sqrt, ln, pi and + - * / ^: sympy's own
parser evaluates Python.
"""

import re

_TOKEN = re.compile(r"sqrt|ln|pi|\d+\.?\d*|\.\d+|[a-z]|[-+*/^()]")
_MAX_EXPONENT = 99
_FACTOR_STARTS = re.compile(r"[a-z\d.(]")


def load():
    import sympy

    def equal(question):
        gold, found = (Parser(sympy, text).parse() for text in question)
        return bool(sympy.simplify(gold - found) == 0)

    if equal(["x+x", "2x"]) is not True:  # otherwise every answer would silently be graded wrong
        raise RuntimeError("sympy does not find x+x equal to 2x")
    return equal


class Parser:
    """Recursive descent; raises ValueError for text outside of the grammar."""

    def __init__(self, sympy, text):
        self.sympy = sympy
        self.tokens = _TOKEN.findall(text)
        if "".join(self.tokens) != text or not text:
            raise ValueError("an answer with other characters")
        self.position = 0

    def parse(self):
        value = self.sum()
        if self.position < len(self.tokens):
            raise ValueError("an answer with a rest")
        return value

    def next(self):
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected):
        if self.next() not in expected:
            return ""
        self.position += 1
        return self.tokens[self.position - 1]

    def sum(self):
        value = self.product()
        while operator := self.take("+", "-"):
            term = self.product()
            value = value + term if operator == "+" else value - term
        return value

    def product(self):
        value = self.signed()
        while True:
            if self.take("*"):
                value = value * self.signed()
            elif self.take("/"):
                value = value / self.signed()
            elif _FACTOR_STARTS.match(self.next()):  # 2x, 2(x+1)
                value = value * self.power()
            else:
                return value

    def signed(self):
        sign = 1
        while operator := self.take("+", "-"):
            sign = -sign if operator == "-" else sign
        return sign * self.power()

    def power(self):
        base = self.atom()
        if not self.take("^"):
            return base
        exponent = self.signed()
        if exponent.is_number and not (exponent.is_Integer and abs(exponent) <= _MAX_EXPONENT):
            raise ValueError("an answer with a large exponent")
        return base**exponent

    def atom(self):
        token = self.next()
        self.position += 1
        if token in ("sqrt", "ln"):
            if self.next() != "(":
                raise ValueError(f"{token} without brackets")
            return (self.sympy.sqrt if token == "sqrt" else self.sympy.log)(self.atom())
        if token == "(":
            value = self.sum()
            if not self.take(")"):
                raise ValueError("unbalanced brackets")
            return value
        if token == "pi":
            return self.sympy.pi
        if re.fullmatch("[a-z]", token):
            return self.sympy.Symbol(token)
        if token and (token[0].isdigit() or token[0] == "."):
            return self.sympy.Rational(token.rstrip("."))
        raise ValueError("an answer that is no expression")
