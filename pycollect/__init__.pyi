from . import cuda as cuda
from . import scheme as scheme
from .collectors.async_batched import AsyncBatchedCollector as AsyncBatchedCollector
from .collectors.distributed import DistributedDataCollector as DistributedDataCollector
from .collectors.distributed import DistributedSyncDataCollector as DistributedSyncDataCollector
from .collectors.evaluator import Evaluator as Evaluator
from .collectors.helpers import OffPolicyCollectorConfig as OffPolicyCollectorConfig
from .collectors.helpers import OnPolicyCollectorConfig as OnPolicyCollectorConfig
from .collectors.helpers import make_collector_offpolicy as make_collector_offpolicy
from .collectors.helpers import make_collector_onpolicy as make_collector_onpolicy
from .collectors.helpers import sync_async_collector as sync_async_collector
from .collectors.helpers import sync_sync_collector as sync_sync_collector
from .collectors.multi import AsyncCollector as AsyncCollector
from .collectors.multi import MultiaSyncDataCollector as MultiaSyncDataCollector
from .collectors.multi import MultiCollector as MultiCollector
from .collectors.multi import MultiSyncDataCollector as MultiSyncDataCollector
from .collectors.ray import RayCollector as RayCollector
from .collectors.rpc import RPCDataCollector as RPCDataCollector
from .collectors.single import SyncDataCollector as SyncDataCollector
from .collectors.stats_writer import StatsWriter as StatsWriter
from .compat.profiling import ProfileConfig as ProfileConfig
from .engines.distributed.delayed import submitit_delayed_launcher as submitit_delayed_launcher
from .errors import WorkerError as WorkerError
from .policy.random_policy import RandomPolicy as RandomPolicy
from .trajectories.multistep import MultiStep as MultiStep
from .trajectories.split import split_trajectories as split_trajectories

# The names that TorchRL has had since, and before.
Collector = SyncDataCollector
DistributedCollector = DistributedDataCollector
DistributedSyncCollector = DistributedSyncDataCollector
MultiAsyncCollector = MultiaSyncDataCollector
MultiSyncCollector = MultiSyncDataCollector
RPCCollector = RPCDataCollector

__version__: str
filter_warnings_subprocess: bool
