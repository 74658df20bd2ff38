"""`yoro status` shows what the status document says."""

import io

from rich.console import Console
from sqlalchemy import Engine

from service.batches.status import policy_status
from service.database.engine import transaction
from tests.service.batches.ground import make_ground
from yoro.cli.status import screen


def test_the_screen_names_what_is_missing_its_age_and_every_alert(engine: Engine) -> None:
    ground = make_ground(engine)
    for number in range(3):
        ground.trace(f"t{number}")
    for number in range(2):
        ground.grade(f"t{number}", number)
    ground.grade("elsewhere", 1.0)
    ground.form()
    ground.pass_time(3 * 3600)
    with transaction(engine) as connection:
        document = policy_status(connection, ground.policy_id)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(document))
    shown = console.export_text()
    assert f"{ground.name}: version 0, promoted 0" in shown
    assert "trainer: absent" in shown
    assert "next batch: 0 of 2 tasks, 1 batch(es) wait for the trainer" in shown
    assert "! trainer_absent: a batch has waited" in shown
    assert "waiting_reward 1 3 h no_grade 1" in " ".join(shown.split())
    assert "1 grades" in shown
