"""The rules file: literal and prefix, default deny, a denial wins, and mistakes are told."""

from pathlib import Path

import pytest

from oncebox.access.permissions import Need, Permission, Policy, PolicyError, read_policy

USE, READ, TOPIC = Permission.USE_ID, Permission.READ_ID, Permission.WRITE_TOPIC
GROUP, ADMIN_READ, ADMIN_WRITE, PEER = (
    Permission.READ_GROUP,
    Permission.ADMIN_READ,
    Permission.ADMIN_WRITE,
    Permission.PEER,
)


def policy(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return read_policy(file)


def test_a_literal_is_no_prefix(tmp_path: Path):
    rules = policy(tmp_path, "rules: [{principals: ['cert:x'], transactional_ids: [a], topics: [{prefix: a}]}]")
    assert rules.allows("cert:x", Need(USE, "a"))
    assert not rules.allows("cert:x", Need(USE, "ab"))
    assert not rules.allows("cert:x", Need(USE, ""))
    assert not rules.allows("cert:x", Need(USE, "A"))
    assert rules.allows("cert:x", Need(TOPIC, "ab"))
    assert not rules.allows("cert:x", Need(TOPIC, "ba"))


def test_a_star_inside_a_name_is_a_star(tmp_path: Path):
    rules = policy(tmp_path, "rules: [{principals: ['cert:x'], transactional_ids: ['a*']}]")
    assert rules.allows("cert:x", Need(USE, "a*"))
    assert not rules.allows("cert:x", Need(USE, "ab"))


def test_nothing_is_allowed_without_a_rule(tmp_path: Path):
    rules = policy(tmp_path, "rules: []")
    assert not any(rules.allows("cert:x", Need(permission, "a")) for permission in Permission)


def test_everybody_means_everybody_known(tmp_path: Path):
    rules = policy(tmp_path, "rules: [{principals: ['*'], topics: ['*']}]")
    assert rules.allows("token:x", Need(TOPIC, "t"))
    assert not rules.allows("anonymous", Need(TOPIC, "t"))


def test_kinds_of_identity_are_kept_apart(tmp_path: Path):
    rules = policy(tmp_path, "rules: [{principals: ['cert:x'], admin: write}]")
    assert rules.allows("cert:x", Need(ADMIN_WRITE))
    assert not rules.allows("token:x", Need(ADMIN_WRITE))


def test_who_may_use_may_read_and_not_the_other_way(tmp_path: Path):
    rules = policy(
        tmp_path,
        "rules: [{principals: ['cert:u'], transactional_ids: [a]}, "
        "{principals: ['cert:r'], readable_transactional_ids: [a]}, {principals: ['cert:o'], admin: read}, "
        "{principals: ['cert:w'], admin: write}]",
    )
    assert rules.allows("cert:u", Need(READ, "a"))
    assert not rules.allows("cert:r", Need(USE, "a"))
    assert rules.allows("cert:o", Need(READ, "a"))
    assert not rules.allows("cert:o", Need(USE, "a"))
    assert not rules.allows("cert:o", Need(ADMIN_WRITE))
    assert rules.allows("cert:w", Need(ADMIN_READ))
    assert not rules.allows("cert:w", Need(PEER))
    assert not rules.allows("cert:w", Need(GROUP, "g"))


def test_a_denial_wins(tmp_path: Path):
    rules = policy(
        tmp_path,
        "rules: [{principals: ['cert:x'], transactional_ids: ['*'], admin: write}, "
        "{principals: ['*'], effect: deny, transactional_ids: [{prefix: secret-}], admin: write}]",
    )
    assert rules.allows("cert:x", Need(USE, "a"))
    assert not rules.allows("cert:x", Need(USE, "secret-1"))
    assert not rules.allows("cert:x", Need(ADMIN_WRITE))
    assert rules.allows("cert:x", Need(ADMIN_READ))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "rules"),
        ("rules: [", "line 1: not YAML"),
        ("rules: [{principals: [x]}]", "no principal: cert:NAME"),
        ("rules: [{principals: []}]", "rules.0.principals"),
        ("rules: [{principals: ['*'], topic: [a]}]", "rules.0.topic: Extra inputs"),
        ("rules: [{principals: ['*'], admin: root}]", "rules.0.admin"),
        ("rules: [{principals: ['*'], topics: [{prefix: ''}]}]", "rules.0.topics.0"),
        ("rules: [{principals: ['*'], topics: [{suffix: a}]}]", "rules.0.topics.0"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, text, told):
    with pytest.raises(PolicyError, match=told.replace("(", r"\(")):
        policy(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(PolicyError, match="No such file"):
        read_policy(tmp_path / "absent.yaml")
