"""The processes of a run, found without asking the run."""

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path

RUN_ID = "SF_TORCHRL_TEST_RUN"


class Family:
    """Every process that inherited a run id in its environment, whoever started it and how."""

    def __init__(self):
        self.environment = {RUN_ID: uuid.uuid4().hex}

    def members(self):
        """Command lines of the living, by process id; the dead and not yet buried have none."""
        mark = f"{RUN_ID}={self.environment[RUN_ID]}".encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = line.decode()
        return found

    def env_workers(self):
        """Ids of the env worker processes."""
        return [pid for pid, line in self.members().items() if "env_worker" in line]

    def left_after(self, seconds):
        """Who still lives when all have had so long to end."""
        deadline = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def assert_gone(self):
        """All have ended, or do so within seconds; if not, they are ended here."""
        left = self.left_after(5)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        assert left == {}

    @contextlib.contextmanager
    def adopting(self):
        """What this process starts in the meantime belongs to the family."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield self
        finally:
            os.environ.clear()
            os.environ.update(before)
