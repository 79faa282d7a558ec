"""Builds, loads, launches, watches and reports: everything that touches a compiler or a process."""

if __name__ != "pagefuzz.harness":
    # As a top-level module it would shadow other people's packages of that name.
    raise ImportError(f"import pagefuzz.harness, not {__name__}")
