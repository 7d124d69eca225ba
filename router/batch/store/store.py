"""The store as its users see it: three tables over one database."""

from router.batch.store.batches import BatchTable
from router.batch.store.database import Database
from router.batch.store.files import FileTable
from router.batch.store.requests import RequestTable


class Store:
    def __init__(self, url: str) -> None:
        self._database = Database(url)
        self.files = FileTable(self._database)
        self.batches = BatchTable(self._database)
        self.requests = RequestTable(self._database)

    def close(self) -> None:
        self._database.close()
