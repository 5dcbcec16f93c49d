"""``sf-torchrl`` and ``python -m sf_torchrl``: a thin start that lets imports overlap."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; see ``sf-torchrl --help``."""
    # Envs named module:function lie beside the user, not beside the installed script.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    if _trains(sys.argv[1:]):
        # The inference worker imports torch while this process imports Lightning.
        from sf_torchrl.workers.supervisor import prewarm_inference_worker

        prewarm_inference_worker()
    from sf_torchrl.cli import run

    sys.exit(run(sys.argv[1:]))


def _trains(arguments: list[str]) -> bool:
    looks = ("-h", "--help", "--print_config", "--help=")
    return arguments[:1] == ["fit"] and not any(a.startswith(looks) for a in arguments)


if __name__ == "__main__":
    main()
