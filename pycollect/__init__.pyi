from . import cuda as cuda
from . import scheme as scheme
from .api.async_batched import AsyncBatchedCollector as AsyncBatchedCollector
from .api.distributed import DistributedDataCollector as DistributedDataCollector
from .api.distributed import DistributedSyncDataCollector as DistributedSyncDataCollector
from .api.distributed import RPCDataCollector as RPCDataCollector
from .api.evaluator import Evaluator as Evaluator
from .api.helpers import OffPolicyCollectorConfig as OffPolicyCollectorConfig
from .api.helpers import OnPolicyCollectorConfig as OnPolicyCollectorConfig
from .api.helpers import make_collector_offpolicy as make_collector_offpolicy
from .api.helpers import make_collector_onpolicy as make_collector_onpolicy
from .api.helpers import sync_async_collector as sync_async_collector
from .api.helpers import sync_sync_collector as sync_sync_collector
from .api.multi import AsyncCollector as AsyncCollector
from .api.multi import MultiaSyncDataCollector as MultiaSyncDataCollector
from .api.multi import MultiCollector as MultiCollector
from .api.multi import MultiSyncDataCollector as MultiSyncDataCollector
from .api.ray import RayCollector as RayCollector
from .api.single import SyncDataCollector as SyncDataCollector
from .api.stats_writer import StatsWriter as StatsWriter
from .check.api import check_env as check_env
from .compat.profiling import ProfileConfig as ProfileConfig
from .data.multistep import MultiStep as MultiStep
from .data.split import split_trajectories as split_trajectories
from .errors import WorkerError as WorkerError
from .policy.random_runner import RandomPolicy as RandomPolicy
from .transport.distributed.delayed import submitit_delayed_launcher as submitit_delayed_launcher

# The names that TorchRL has had since, and before.
Collector = SyncDataCollector
DistributedCollector = DistributedDataCollector
DistributedSyncCollector = DistributedSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
MultiSyncCollector = MultiSyncDataCollector
RPCCollector = RPCDataCollector

__version__: str
filter_warnings_subprocess: bool
