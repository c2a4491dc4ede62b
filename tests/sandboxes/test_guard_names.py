"""Names a shell gives values to, programs that run others, and what would end the runner itself."""

from __future__ import annotations

import asyncio

import pytest

from sandboxes.base import CommandRefused, SandboxSpec
from sandboxes.guard import exported, guard, is_shell
from sandboxes.local import LocalBackend

HOME = "/home/ann"


def test_variables_of_earlier_commands_count() -> None:
    variables = exported("declare -x D=\"/\"\nexport BUILD='a b'\ndeclare -x EMPTY\n")
    assert variables == {"D": "/", "BUILD": "a b"}
    assert guard("rm -rf $D", home=HOME, variables=variables) == "recursive removal of /"
    assert guard('rm -rf "$BUILD"/*', home=HOME, variables=variables) == ""
    assert guard("rm -rf $HOME", home=HOME, variables={"HOME": "/srv/x"})


@pytest.mark.parametrize("command", ["sh", "bash -i", "/bin/dash -s", "zsh -il"])
def test_a_shell_reads_commands(command: str) -> None:
    assert is_shell(command)


@pytest.mark.parametrize("command", ["", "python3", "bash x.sh", "cat", "bash -c ls"])
def test_other_programs_read_data(command: str) -> None:
    assert not is_shell(command)


def test_what_is_written_to_a_shell_is_judged() -> None:
    async def scenario() -> None:
        sandbox = await LocalBackend().open(SandboxSpec(run_name="r", rollout_id="1"))
        try:
            process = await sandbox.start("sh")
            with pytest.raises(CommandRefused, match="too long"):
                await process.write(b"true;" * 5000)  # harmless, yet refused
            await process.write(b"echo fine\nexit\n")
            assert await process.wait(5)
            assert process.output() == "fine\n"
            cat = await sandbox.start("cat")
            await cat.write(b"true;" * 5000)
            await cat.close_stdin()
            assert await cat.wait(5)
        finally:
            await sandbox.close()

    asyncio.run(scenario())
