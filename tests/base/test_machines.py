"""Machine files for ``--machine``: what they give, and what is wrong in one."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_ext.base.machines import MACHINES, machine_of, machine_toml

ALL = "gemm = 1e11\ngrouped = 1e11\nattention = 2e10\nfp32 = 1e11\nmemory = 2e10\nin_node = 1e9\n"


def test_a_file_has_what_it_says_and_the_rest_of_what_it_extends(tmp_path: Path):
    file = tmp_path / "my_card.toml"
    file.write_text('extends = "gb200"\ngemm = 1.5e15\nslower = {"grouped GEMM" = 1.4}\n')
    found = machine_of(str(file))
    factors = {"grouped GEMM": 1.4}
    assert found == replace(MACHINES["gb200"], gemm=1.5e15, slower=factors, name="gb200")
    assert (found.ranks_per_node, found.nvlink_domain) == (4, 72)
    file.write_text('extends = "gb200"\nranks_per_node = 2\n')
    assert machine_of(str(file)).nvlink_domain == 2, "a node's, where nobody says more"
    assert machine_of("gb200").name == "gb200"
    file.write_text(f"{ALL}in_node_all_to_all = 1e9\n")
    found = machine_of(str(file))
    assert (found.gemm, found.launch, found.name) == (1e11, MACHINES["h100"].launch, "")


@pytest.mark.parametrize("domain", [2, 8])
def test_a_written_file_has_the_same_nodes(domain: int, tmp_path: Path):
    card = replace(MACHINES["h100"], ranks_per_node=2, nvlink_domain=domain, capability=None)
    file = tmp_path / "my_card.toml"
    file.write_text("\n".join(machine_toml(card)))
    assert machine_of(str(file)) == card


@pytest.mark.parametrize("extends", ["", "h200"])
def test_a_written_file_gives_the_same_machine(extends: str, tmp_path: Path):
    file, base = tmp_path / "my_card.toml", MACHINES[extends or "h100"]
    card = replace(base, name=extends, gemm=6.5e14, half_rate_rows=99.5, slower={"codec": 1.25})
    if not extends:  # nobody knows what it has
        card = replace(card, capability=None)
    lines = [*machine_toml(card)]
    assert len(lines) == (4 if extends else 9)  # only what differs
    file.write_text("\n".join(lines))
    assert machine_of(str(file)) == card


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "h100"\ngem = 1.0', "gem: no such key of a machine; did you mean 'gemm'?"),
        ('extends = "h10"', "extends is 'h10'; expected one of h100, "),
        ('extends = "h100"\ngemm = -1', "gemm is -1; expected a positive number, as 7.98e+14 of"),
        ('extends = "h100"\nmemory = "3TB"', "memory is '3TB'; expected a positive number"),
        ('extends = "h100"\nlaunch = true', "launch is True; expected a positive number"),
        ('extends = "h100"\nranks_per_node = 0', "ranks_per_node is 0; expected how many ranks"),
        ('extends = "h100"\nslower = 2.0', "slower is 2.0; expected a table of factors"),
        ('extends = "h100"\nslower = {GEM = 2}', "no kind 'GEM'; expected some of codec, "),
        ('extends = "h100"\nslower = {GEMM = 0}', "slower.GEMM is 0; expected a positive factor"),
        (ALL, 'no in_node_all_to_all; expected all rates, or extends = "h100"'),
        ("gemm =", "expected a TOML file with rates of a machine: Invalid value"),
        ('extends = "h100"\ngem = 1\nmemroy = 2', "2 mistakes:"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_at_once(text: str, message: str, tmp_path: Path):
    file = tmp_path / "my_card.toml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        machine_of(str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)


def test_a_name_that_nobody_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("my_card.toml").touch()
    with pytest.raises(ValueError, match=r"no such file; .* did you mean 'my_card\.toml'\?"):
        machine_of("my_crd.toml")
    with pytest.raises(ValueError, match=r"'h10'; .*, or a TOML file with rates; did you mean 'h"):
        machine_of("h10")
