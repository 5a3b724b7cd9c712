"""`python -m frame_ray.child PARENT ARGUMENTS`: runs `frame serve ARGUMENTS`, which ends with the
process PARENT."""

from __future__ import annotations

import runpy
import sys

from frame.host.child_process import die_with_parent

if __name__ == "__main__":
    parent, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    sys.argv[1:] = ["serve", *arguments]
    runpy.run_module("frame", run_name="__main__", alter_sys=True)
