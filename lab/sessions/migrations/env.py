"""What Alembic runs: the revisions, in the transaction that lab.sessions.database has begun."""

from alembic import context

from engram_lab.lab.sessions.schema import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
