"""Calibration: what a model's layers are like, what each way to keep them costs, and the plan that follows.

``calibrate`` measures, ``within_bytes`` and ``within_loss`` choose.
"""

from __future__ import annotations

from kvtailor.calibrate.options import Option, option, options
from kvtailor.calibrate.plans import Planned, within_bytes, within_loss
from kvtailor.calibrate.run import calibrate
from kvtailor.calibrate.table import LayerTable, Measurement, Table

__all__ = [
    "LayerTable",
    "Measurement",
    "Option",
    "Planned",
    "Table",
    "calibrate",
    "option",
    "options",
    "within_bytes",
    "within_loss",
]
