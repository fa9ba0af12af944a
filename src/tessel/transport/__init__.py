"""Messages between processes: the only package that sends anything over `torch.distributed`.

A `Group` is a set of workers that can communicate. CPU tensors are sent through shared memory
between workers of one host, and between hosts by MPI if mpirun has started the workers; tensors of
GPUs are sent by NCCL, or through mailboxes if workers share a GPU; and everything else through
`torch.distributed`. This package may import `core.boxes`, `encoding`, `endings`, `errors`,
`limits`, `machine` and `settings`.
"""

from tessel.transport.buffers import ReceiveBuffer as ReceiveBuffer
from tessel.transport.buffers import SendBuffer as SendBuffer
from tessel.transport.constants import NOTHING as NOTHING
from tessel.transport.constants import UNREAD as UNREAD
from tessel.transport.copy_program import CopyProgram as CopyProgram
from tessel.transport.copy_program import Place as Place
from tessel.transport.copy_program import has_engine as has_engine
from tessel.transport.copy_program import keep_unchanged as keep_unchanged
from tessel.transport.group import DIFFERENT as DIFFERENT
from tessel.transport.group import NUM_WORDS as NUM_WORDS
from tessel.transport.group import Group as Group
from tessel.transport.group import code_of as code_of
from tessel.transport.group import is_plain as is_plain
from tessel.transport.group import packed_words as packed_words
from tessel.transport.group import tells_errors as tells_errors
from tessel.transport.host import Again as Again
from tessel.transport.job import Tagged as Tagged
from tessel.transport.job import between_gpus as between_gpus
from tessel.transport.job import between_hosts as between_hosts
from tessel.transport.job import can_share_memory as can_share_memory
from tessel.transport.job import checks_calls as checks_calls
from tessel.transport.job import chosen_transport as chosen_transport
from tessel.transport.job import group_of as group_of
from tessel.transport.job import hosts as hosts
from tessel.transport.job import kept_in_job as kept_in_job
from tessel.transport.job import leave as leave
from tessel.transport.job import look_for_job as look_for_job
from tessel.transport.job import shares_memory as shares_memory
from tessel.transport.job import start as start
from tessel.transport.job import total_traffic as total_traffic
from tessel.transport.job import when_joined as when_joined
from tessel.transport.mesh import mesh_of as mesh_of
from tessel.transport.mesh import rows_of_meshes as rows_of_meshes
from tessel.transport.reading import is_pinned as is_pinned
from tessel.transport.traffic import Traffic as Traffic
from tessel.transport.wire import share_over as share_over
from tessel.transport.world import is_distributed as is_distributed
from tessel.transport.world import launched_as as launched_as
from tessel.transport.world import num_workers as num_workers
from tessel.transport.world import own_gpu as own_gpu
from tessel.transport.world import this_worker as this_worker
