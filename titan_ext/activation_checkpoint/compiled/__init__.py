# SPDX-License-Identifier: BSD-3-Clause
"""The same policies under torch.compile.

Hooks do not run in compiled code. The compiler traces ``checkpoint`` and asks it about each
operation; ``partition`` cuts forward from backward and writes float8 into the two graphs.
"""
