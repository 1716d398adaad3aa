"""The first tables. There is no way back: a downgrade would lose sessions."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "sessions_and_runs"
down_revision: str | None = None


def upgrade() -> None:
    """Tables, indexes, and the store's own id."""
    store = op.create_table("store", sa.Column("id", sa.String(32), primary_key=True))
    op.bulk_insert(store, [{"id": uuid.uuid4().hex}])
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(120), nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("search", sa.Text, nullable=False),
        sa.Column("created", sa.DateTime, nullable=False),
        sa.Column("updated", sa.DateTime, nullable=False, index=True),
        sa.Column("deleted", sa.DateTime),
    )
    living = sa.text("deleted IS NULL")
    op.create_index("one_of_a_name", "sessions", ["name"], unique=True, sqlite_where=living, postgresql_where=living)
    session = sa.ForeignKey("sessions.id", ondelete="CASCADE")
    op.create_table(
        "tags",
        sa.Column("session_id", sa.String(32), session, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(60), nullable=False, index=True),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column(
            "session_id", sa.String(32), sa.ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False, index=True
        ),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("probe", sa.String(60), nullable=False),
        sa.Column("models_json", sa.Text, nullable=False),
        sa.Column("seed", sa.String(40), nullable=False),
        sa.Column("versions_json", sa.Text, nullable=False),
        sa.Column("environment_json", sa.Text, nullable=False),
        sa.Column("created", sa.DateTime, nullable=False),
        sa.Column("seconds", sa.Double),
        sa.Column("blob", sa.String(64), nullable=False),
        sa.Column("view", sa.String(64)),
        sa.Column("attachments_json", sa.Text, nullable=False),
        sa.Column("request", sa.String(64), nullable=False),
        sa.Column("search", sa.Text, nullable=False),
        sa.Column("deleted", sa.DateTime),
    )
    op.create_table(
        "run_models",
        sa.Column("run_id", sa.String(32), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, index=True),
    )
