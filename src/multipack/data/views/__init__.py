"""The documents of a run as rows of tables: cut, divided, mixed, held out, or with shared beginnings."""
