# SPDX-License-Identifier: BSD-3-Clause
"""What every floor uses: messages, Titan's names, a host without accelerator, operations' costs."""
