"""What scripts share: where a report goes, and how a run ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagefuzz.harness.commands.fuzz import make_folder, write_json
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.arena import DeviceFaultError, DoesNotFitError


def require_report(path: Path | None) -> None:
    """Raises `CannotCheckError` if no file can be written there, before hours of work. None: no
    report is asked for."""
    if path is None:
        return
    if path.is_dir():
        raise CannotCheckError(f"cannot write the report {path}: it is a folder; name a file")
    make_folder(path.parent)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Raises `CannotCheckError` with the reason."""
    make_folder(path.parent)
    write_json(path, report)


def exit_code(run: Callable[[], int], could_not: str) -> int:
    """What `run` returns; 2, with one sentence that begins with `could_not`, where it could not do
    what it was asked for."""
    try:
        return run()
    except DeviceFaultError as error:
        why = f"a launch broke the device's context: {error.name} ({error})"
    except (CannotCheckError, DoesNotFitError) as error:
        why = str(error)
    except MemoryError:
        why = "this machine has no memory left"
    except KeyboardInterrupt:
        why = "interrupted"
    except Exception as error:  # noqa: BLE001 - Python's own exit code 1 would be a result
        traceback.print_exc()
        why = f"internal error: {type(error).__name__}: {error}; please report it"
    print(f"{could_not}: {why}", file=sys.stderr)
    return 2
