"""Dense models, as they come of codes, in the formats of other programs.

Each writer leaves in the model what its file holds: the weights that a reader decodes. So what the
format costs can be measured on the model itself.
"""

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Of GGUF: those that the package gguf can encode. llama-quantize makes K-quants from them."""
GROUPS = (128, 64, 32)
"""Of GPTQ: weights that may share a scale."""
