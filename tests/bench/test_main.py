import subprocess
import sys

import pytest

from bench.__main__ import COMMANDS, main


def test_the_list_says_what_each_command_shows(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)


def test_without_a_name_the_list_is_the_help():
    done = subprocess.run([sys.executable, "-m", "bench"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"equality" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert COMMANDS[name][:20] in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["nothing"])
    assert "invalid choice" in capsys.readouterr().err
