"""Lets the campaign set the clock of a run: adds the seconds in the file ``FP8RL_CLOCK`` to ``time.time``."""

import mmap
import os
import struct
import time

if "FP8RL_CLOCK" in os.environ:
    with open(os.environ["FP8RL_CLOCK"], "rb") as _file:
        _shift = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
    _true_time = time.time
    time.time = lambda: _true_time() + struct.unpack("d", _shift[:8])[0]
