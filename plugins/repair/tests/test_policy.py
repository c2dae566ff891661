"""The checkpoint of the package: what it is trained for, its base, and where `run` takes it."""

import json
from pathlib import Path

from nano_coder.agent.profiles import REPAIR_1
from nano_coder.config import catalogue
from nano_coder.models.opening import at_hand, known_models
from nano_repair import FOLDER
from nano_shared.checkpoint import read_checkpoint


def test_it_is_found_by_name_and_trained_for_the_profile_as_it_is() -> None:
    assert at_hand("coder-repair") == str(FOLDER)
    assert "coder-repair" in dict(known_models())
    manifest = read_checkpoint(FOLDER)
    assert (manifest.kind, manifest.profile, manifest.profile_hash) == ("adapter", "repair-1", REPAIR_1.hash)


def test_its_base_is_the_model_of_the_catalogue_that_names_it() -> None:
    base = json.loads((FOLDER / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert catalogue()[base].checked_policy == "coder-repair"


def test_its_package_stays_small() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).rglob("*") if path.is_file()) < 40 * 10**6
