"""`pagefuzz doctor`: prints what `harness.doctor` finds."""

from __future__ import annotations

import textwrap

from pagefuzz.harness.doctor import examine
from pagefuzz.harness.layers import CUDA, HOST, LAYERS
from pagefuzz.harness.reporters.figures import screen_width, table

_NAME_WIDTH = 19


def doctor() -> int:
    """Exit code 0 if anything can be checked here, else 2."""
    width = screen_width()
    found = examine()
    for fact in found.facts:
        _field(f"{' ' if fact.there else '!'} {fact.name}", fact.text, width)
    print()
    for line in table(
        ("layer", HOST, CUDA, "build", "sees"),
        [
            (
                layer.name,
                found.layer_on(layer, HOST),
                found.layer_on(layer, CUDA),
                layer.needs or "any",
                layer.sees,
            )
            for layer in LAYERS
        ],
        left=range(5),
    ):
        print(line)
    print()
    for backend, why in found.unusable.items():
        _field(f"  {backend}", f"cannot be used: {why}" if why else "can be used", width)
        for layer in LAYERS if not why else ():
            if backend in layer.backends and (lacking := found.why_not(layer, backend)):
                _field(f"  {backend}", f"without {layer.name}: {lacking}", width)
    usable = [backend for backend, why in found.unusable.items() if not why]
    if not usable:
        print("nothing can be checked on this machine")
        return 2
    print(f"\n--device auto runs on {'cuda' if CUDA in usable else HOST}")
    return 0


def _field(label: str, text: str, width: int) -> None:
    print(
        textwrap.fill(
            text,
            width,
            initial_indent=f"{label:<{_NAME_WIDTH}} ",
            subsequent_indent=" " * (_NAME_WIDTH + 1),
        )
    )
