import subprocess
import sys

from bench.__main__ import COMMANDS, main


def test_the_list_says_what_each_command_shows(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)


def test_without_a_name_the_list_is_the_help():
    done = subprocess.run([sys.executable, "-m", "bench"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"equality" in done.stdout
