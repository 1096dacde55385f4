# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a model or a run that stand alone: dispatch, halves, LoRA, optimizers, exports."""
