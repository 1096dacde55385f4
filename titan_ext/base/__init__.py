# SPDX-License-Identifier: BSD-3-Clause
"""Helpers for every floor: messages, Titan's names, hosts without accelerator, costs."""
