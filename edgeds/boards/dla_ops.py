"""Which ONNX operators have a form on the DLA. Source: NVIDIA's "DLA Supported Layers and Restrictions".

Limits that a layer list cannot show (kernel sizes, axes) are TensorRT's to check at the build; these tables count such
layers as placed.
"""

from __future__ import annotations

PLACEABLE = {
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Clip", "LeakyRelu", "PRelu"), "activation"),
    **dict.fromkeys(("Conv", "ConvTranspose"), "convolution"),
    **dict.fromkeys(("MaxPool", "AveragePool"), "pooling"),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Div", "Pow", "Sum"), "elementwise"),
    **dict.fromkeys(("Concat", "BatchNormalization", "LRN", "Softmax", "Resize", "ReduceMax"), "layer"),
    **dict.fromkeys(("Slice", "Split", "Transpose", "Abs", "Sin", "Cos", "Atan"), "layer"),
}
REASONS = {
    "MatMul": "matrix products have no DLA form",
    "Gemm": "matrix products have no DLA form (a 1x1 Conv has)",
    "Reshape": "shuffles other than 4-D transposes have no DLA form",
    "GlobalAveragePool": "its window is larger than the 8x8 a DLA pools",
    "ReduceMean": "of reductions only the maximum has a DLA form",
    "ReduceSum": "of reductions only the maximum has a DLA form",
    "HardSigmoid": "this activation has no DLA form",
    "HardSwish": "this activation has no DLA form",
}
