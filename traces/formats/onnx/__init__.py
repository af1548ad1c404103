"""Reader of ONNX models."""

from opgrip.traces.formats.onnx import models as models
