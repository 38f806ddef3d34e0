"""The outbox as a SQLAlchemy model: mix it into a class of your own declarative base."""

import uuid
from datetime import datetime
from typing import Any

from sqlalchemy import DateTime, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column


class OutboxMixin:
    """The table that `oncebox outbox init` makes."""

    __tablename__ = "outbox"

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    aggregatetype: Mapped[str]
    aggregateid: Mapped[str]
    type: Mapped[str]
    # None as SQL's NULL: a tombstone.
    payload: Mapped[Any] = mapped_column(JSONB(none_as_null=True), default=None, nullable=True)
    headers: Mapped[dict[str, str] | None] = mapped_column(JSONB(none_as_null=True), default=None)
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
