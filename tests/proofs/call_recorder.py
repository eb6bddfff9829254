"""Records which files' functions run in a process: copied as `sitecustomize.py` to where every Python process of a
server under measurement imports it first.

Of the standard library alone. While the file `recording` stands in the folder of the copy, every call of a Python
function in any thread is noted; when it goes, the files of those functions are written into the folder as one JSON list
a process and recording.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

FLAG = "recording"
_POLL_SECONDS = 0.01


def record(folder: Path) -> None:
    """Begin to record this process, for as long as it lives."""
    seen: set[CodeType] = set()
    on = False

    def note(frame: FrameType, event: str, argument: object) -> None:
        if on and event == "call":
            seen.add(frame.f_code)

    def follow() -> None:
        nonlocal on
        sys.setprofile(None)
        number = 0
        while True:
            time.sleep(_POLL_SECONDS)
            wanted = (folder / FLAG).exists()
            if on and not wanted:
                called = sorted({code.co_filename for code in seen.copy() if code.co_name != "<module>"})
                seen.clear()
                written = folder / f"{os.getpid()}.{number}"
                written.write_text(json.dumps(called))
                written.rename(written.with_suffix(f".{number}.json"))
                number += 1
            on = wanted

    threading.Thread(target=follow, name="call recorder", daemon=True).start()
    threading.setprofile(note)
    sys.setprofile(note)


if __name__ == "sitecustomize":
    record(Path(__file__).parent)
