"""Hypothesis strategies that draw cases."""

if __name__ != "pagefuzz.strategies":
    # As a top-level module it would shadow other people's packages of that name.
    raise ImportError(f"import pagefuzz.strategies, not {__name__}")
