# SPDX-License-Identifier: BSD-3-Clause
"""The passes over a model in their order, the keys that steer them, and what they refuse."""
