"""Convert objects with arrays to and from uint8 tensors, for a process group that sends tensors. Pure.

Arrays are not copied: they are pickle's out-of-band buffers (PEP 574). ``torch.distributed`` would pickle the whole
object and pad all parts of a scatter to the longest.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pack(value: Any) -> list[Tensor]:
    """The message of a picklable object, uint8 [bytes] each: its arrays, and the pickle that refers to them."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [bytearray(head), *(buffer.raw() for buffer in buffers)]
    return [torch.from_numpy(np.frombuffer(part, np.uint8)) for part in parts]


def unpack(message: Sequence[Tensor]) -> Any:
    """The object of a message. Its arrays are views of the message."""
    head, *buffers = (part.numpy() for part in message)
    return pickle.loads(head, buffers=buffers)
