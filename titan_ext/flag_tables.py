"""Tables as flags: ``--parallelism.fsdp_reshard_groups attention never moe always``.

Of a dict that is not empty tyro makes one flag for each key and accepts no other, so that a table
in a file could not be changed on the command line. With this annotation the flag is the table.
"""

from collections.abc import Callable
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec

__all__ = ["table_flag"]


def table_flag(value_from: Callable[[str], Any] = str) -> PrimitiveConstructorSpec[dict[str, Any]]:
    """For ``Annotated[dict[str, ...], table_flag()]``: names and values in turn.

    Args:
        value_from: Reads a value; what is wrong with it is said by whoever checks the config.
    """

    def read(words: list[str]) -> dict[str, Any]:
        if len(words) % 2:
            raise ValueError("expected names and values in turn")
        return {
            name: value_from(value) for name, value in zip(words[::2], words[1::2], strict=True)
        }

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME VALUE ...",
        instance_from_str=read,
        is_instance=lambda instance: isinstance(instance, dict),
        str_from_instance=lambda table: [str(part) for item in table.items() for part in item],
    )
