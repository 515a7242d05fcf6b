"""The tests of the Triton kernels run where they can: in Triton's interpreter when asked for, or on a GPU."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

runs = find_spec("triton") is not None and (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available())
collect_ignore = [] if runs else ["test_triton.py", "test_layers.py"]
