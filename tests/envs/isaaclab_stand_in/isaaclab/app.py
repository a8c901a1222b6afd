from __future__ import annotations

import signal
from typing import Any


class AppLauncher:
    """Must be made before anything else is imported, as Isaac Sim's modules exist only then."""

    launched: dict[str, Any] | None = None

    def __init__(self, launcher_args: Any = None, **kwargs: Any) -> None:
        assert AppLauncher.launched is None, "one application per process"
        AppLauncher.launched = kwargs
        print("Isaac Lab prints a lot")
        signal.signal(signal.SIGINT, lambda *_: exit(1))
