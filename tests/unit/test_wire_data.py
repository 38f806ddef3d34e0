"""Error codes, settings and the offsets partition: small tables that must be Kafka's."""

import ssl

import pytest
from kio.schema.errors import ErrorCode as KioErrorCode

from oncebox.wire import ErrorCode, KafkaSettings, aiokafka_options, librdkafka_config, offsets_partition
from oncebox.wire.errors import ERROR_CODES


def test_error_codes_are_kafkas():
    ours = {(code.value, code.name, code.retriable) for code in ErrorCode}
    assert ours == {(int(code), code.name.upper(), code.retriable) for code in KioErrorCode}


def test_a_code_newer_than_the_table_is_still_an_error():
    for code in (ErrorCode(9999), ERROR_CODES[9999]):
        assert (code, code.name, code.retriable) == (9999, "ERROR_9999", False)
        assert code
    assert not ErrorCode.NONE


def test_codes_are_found_by_number():
    assert all(ERROR_CODES[code.value] is code for code in ErrorCode)


# From Java's String.hashCode. The second is Integer.MIN_VALUE, for which Kafka takes 0; the last has a surrogate pair.
@pytest.mark.parametrize(
    ("group_id", "java_hash"),
    [("", 0), ("polygenelubricants", 0), ("oncebox", -1322564694), ("groupe-é", 506365602), ("g-😀", 4884617)],
)
def test_offsets_partition_follows_javas_hash(group_id, java_hash):
    assert offsets_partition(group_id, 50) == abs(java_hash) % 50


def test_plaintext_settings():
    settings = KafkaSettings(bootstrap_servers="a:1,b:2", client_id="me")
    assert aiokafka_options(settings) == {"client_id": "me", "security_protocol": "PLAINTEXT"}
    assert librdkafka_config(settings) == {
        "bootstrap.servers": "a:1,b:2",
        "client.id": "me",
        "security.protocol": "PLAINTEXT",
        "socket.connection.setup.timeout.ms": 10_000,
        "connections.max.idle.ms": 540_000,
        "socket.timeout.ms": 15_000,
        "topic.metadata.refresh.interval.ms": 10_000,
    }


def test_sasl_settings_reach_both_clients():
    settings = KafkaSettings(
        bootstrap_servers="a:1",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="ann",
        sasl_password="secret",
        ssl_endpoint_identification_algorithm="none",
    )
    options = aiokafka_options(settings)
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("ann", "secret")
    assert options["ssl_context"].verify_mode is ssl.CERT_REQUIRED
    assert not options["ssl_context"].check_hostname
    config = librdkafka_config(settings)
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl.username"], config["sasl.password"]) == ("ann", "secret")
    assert config["ssl.endpoint.identification.algorithm"] == "none"


async def test_a_token_reaches_both_clients():
    settings = KafkaSettings(
        bootstrap_servers="a:1",
        security_protocol="SASL_SSL",
        sasl_mechanism="OAUTHBEARER",
        sasl_token=lambda: ("the token", 9e9),
    )
    options = aiokafka_options(settings)
    assert options["sasl_mechanism"] == "OAUTHBEARER"
    assert await options["sasl_oauth_token_provider"].token() == "the token"
    config = librdkafka_config(settings)
    assert config["oauth_cb"]("") == ("the token", 9e9)
    assert "sasl.username" not in config
    with pytest.raises(ValueError, match="sasl_token"):
        KafkaSettings(bootstrap_servers="a:1", security_protocol="SASL_SSL", sasl_mechanism="OAUTHBEARER")


def test_certificate_files_are_named_as_librdkafka_names_them():
    settings = KafkaSettings(bootstrap_servers="a:1", security_protocol="SSL", ssl_ca_location="/ca.pem")
    assert librdkafka_config(settings)["ssl.ca.location"] == "/ca.pem"
    assert aiokafka_options(KafkaSettings(bootstrap_servers="a:1", security_protocol="SSL"))[
        "ssl_context"
    ].check_hostname


def test_passwords_are_not_printed():
    settings = KafkaSettings(
        bootstrap_servers="a:1", security_protocol="SASL_PLAINTEXT", sasl_username="ann", sasl_password="secret"
    )
    assert "secret" not in repr(settings)
    assert "secret" not in f"{settings}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bootstrap_servers": ""}, "at least one broker"),
        ({"bootstrap_servers": "a:1", "security_protocol": "SASL_SSL"}, "sasl_username"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        KafkaSettings(**wrong)
