"""What every operation must do: cases, contracts, footprints, references and judgements."""

if __name__ != "pagefuzz.oracles":
    # As a top-level module it would shadow other people's packages of that name.
    raise ImportError(f"import pagefuzz.oracles, not {__name__}")
