"""docs/pipeline.md: its pictures are what its command draws, its numbers and messages what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanotron.config import get_config_from_file
from nanotron.errors import ConfigError
from nanotron.pipeline.communication import communication
from nanotron.pipeline.custom import custom_schedule
from nanotron.pipeline.schedules import SCHEDULE_NAMES, get_schedule
from nanotron.pipeline.simulate import prove, rendezvous, simulate
from nanotron.plan.timeline import predict
from tests.pipeline.test_simulate import receives_first

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_picture_is_what_the_command_draws(name: str, tmp_path: Path) -> None:
    config = get_config_from_file(ROOT / "examples" / "config_3d.yaml", overrides=["parallelism.pp=4"])
    picture = predict(config, costs="1:1:1", schedules=[name])
    picture.write(tmp_path / "now.svg")
    assert (tmp_path / "now.svg").read_text() == (ROOT / "docs" / "pipeline" / f"{name}.svg").read_text()


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_the_table_has_the_simulated_numbers(name: str) -> None:
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    schedule = get_schedule(name, 4, 2)
    simulation = simulate(schedule, 8)
    assert float(cells[2]) == simulation.timeline.duration / schedule.num_chunks
    assert cells[3] == f"{simulation.timeline.bubble:.1%}".replace("%", " %")
    assert float(cells[5]) == max(peak.held for peak in simulation.peaks) / schedule.num_chunks


def test_the_refusals_read_as_quoted(tmp_path: Path) -> None:
    schedule = get_schedule("1f1b", 2)
    with pytest.raises(ConfigError) as error:
        rendezvous(schedule, receives_first(communication(schedule, 4)))
    assert str(error.value).splitlines()[0] in TEXT


def test_the_functions_in_the_text_are_schedules(tmp_path: Path) -> None:
    code = TEXT.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_schedules.py").write_text(code)
    programs = prove(custom_schedule(f"{tmp_path}/my_schedules.py:afab_reversed", 4, 1), 8)
    assert len(programs) == 4
