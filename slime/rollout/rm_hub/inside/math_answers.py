"""Inside the sandbox: whether two answers are equal according to math-verify."""


def load():
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    config = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def equal(question):
        gold, found = (parse(f"\\boxed{{{text}}}", config, parsing_timeout=0) for text in question)
        return bool(gold) and bool(found) and verify(gold, found, timeout_seconds=0)

    if equal(["x+x", "2x"]) is not True:  # otherwise every answer would silently be graded wrong
        raise RuntimeError("math-verify does not find x+x equal to 2x")
    return equal
