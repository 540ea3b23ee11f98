//! An agent of NIXL: memory that is registered with it, and reads of other agents' memory.

use std::any::Any;
use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ptr::{self, NonNull};

use cuda_driver::guard;
use kv_remote::message::Span;

use crate::descriptor::Descriptor;
use crate::library::{AgentConfig, Functions, Handle, Library, check, take_bytes, take_string};
use crate::{NixlError, Status};

/// The backend that moves bytes: UCX, over shared memory, TCP or RDMA.
const BACKEND: &CStr = c"UCX";
/// What has failed when there is no way for a read, or the peer is gone.
pub(crate) const BEGINNING: &str = "beginning a read";

/// `NIXL_CAPI_XFER_OP_READ`.
const READ: u32 = 0;
/// `NIXL_CAPI_SUCCESS`, and `NIXL_CAPI_IN_PROG`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;

/// Where memory is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    Host,
    Device,
}

impl Kind {
    /// Its number in NIXL (`NIXL_CAPI_MEM_DRAM`, `NIXL_CAPI_MEM_VRAM`), and in descriptors.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Self::Host => 0,
            Self::Device => 1,
        }
    }

    pub(crate) fn of(number: u8) -> Option<Self> {
        [Self::Host, Self::Device].into_iter().find(|kind| kind.number() == number)
    }
}

/// What an agent is for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Role {
    /// Its memory is read. A thread of the library makes progress.
    Node,
    /// It reads, and makes progress when it looks. Only by ways that read memory by themselves, unless reads may be emulated.
    Reader {
        /// Whether the process that is read may have to copy.
        emulated: bool,
    },
}

/// The backend's own configuration, without which UCX reads over TCP by having the other process copy.
const NATIVE: (&CStr, &CStr) = (c"engine_config", c"PROTO_EMULATION_ENABLE=n");

/// An agent. Its calls take it by `&mut`, since the library does not lock.
pub(crate) struct Agent {
    library: Library,
    handle: Handle,
    backend: Handle,
    /// What keeps registered memory alive: dropped when the agent is destroyed.
    kept: Vec<Box<dyn Any + Send + Sync>>,
}

// SAFETY: the library's handles are bound to no thread. Its calls need `&mut Agent`, so that no two are made at a time.
unsafe impl Send for Agent {}
// SAFETY: `&Agent` reaches no call of the library.
unsafe impl Sync for Agent {}

/// A read that was begun. It is over once [`Agent::look`] says so.
#[derive(Debug)]
pub(crate) struct Request {
    handle: NonNull<c_void>,
}

// SAFETY: a handle, which is used with `&mut` of the agent alone.
unsafe impl Send for Request {}
// SAFETY: `&Request` reaches nothing.
unsafe impl Sync for Request {}

/// What a look at a read has found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Look {
    Open,
    Done,
    Failed(Status),
}

/// A name that no other agent has.
fn name(role: &str) -> CString {
    let random = || RandomState::new().build_hasher().finish();
    let name = format!("{role}-{}-{:016x}{:016x}", std::process::id(), random(), random());
    CString::new(name).unwrap_or_default()
}

/// The same pointer, unless the library has given none.
fn given(operation: &'static str, handle: Handle) -> Result<NonNull<c_void>, NixlError> {
    NonNull::new(handle).ok_or(NixlError::Call { operation, status: Status::NotFound })
}

/// A list of the library, which goes with its scope.
struct List<'a> {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    _functions: &'a Functions,
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle was made by the constructor that belongs to `destroy`, and is used by nobody else.
        unsafe { (self.destroy)(self.handle) };
    }
}

impl Agent {
    /// An agent whose name no other one has, with UCX.
    pub(crate) fn new(library: &Library, role: Role) -> Result<Self, NixlError> {
        let functions = library.functions();
        let config = AgentConfig {
            enable_prog_thread: role == Role::Node,
            // No port is opened, and nobody is listened to: metadata goes over connections of `kv-remote` (H11).
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            num_workers: 1,
            pthr_delay_us: 0,
            lthr_delay_us: 0,
            capture_telemetry: false,
        };
        let role_name = if role == Role::Node { "kv-node" } else { "kv-reader" };
        let (name, mut handle) = (name(role_name), ptr::null_mut());
        // SAFETY: the arguments live during the call, which copies them.
        let made =
            unsafe { (functions.create_agent)(name.as_ptr(), &raw const config, &raw mut handle) };
        check("creating an agent", made)?;
        given("creating an agent", handle)?;
        let mut agent =
            Self { library: library.clone(), handle, backend: ptr::null_mut(), kept: Vec::new() };
        agent.create_backend(role)?;
        Ok(agent)
    }

    fn create_backend(&mut self, role: Role) -> Result<(), NixlError> {
        let functions = self.library.functions();
        let mut params = ptr::null_mut();
        // SAFETY: `params` is a place for the handle.
        check("creating parameters", unsafe { (functions.create_params)(&raw mut params) })?;
        let params =
            List { handle: params, destroy: functions.destroy_params, _functions: functions };
        let is_native = role == (Role::Reader { emulated: false });
        if guard!("nixl.reads-are-not-emulated", is_native, else false) {
            let (key, value) = NATIVE;
            // SAFETY: the handle is live, and both texts end with a zero byte and are copied.
            let added =
                unsafe { (functions.params_add)(params.handle, key.as_ptr(), value.as_ptr()) };
            check("setting parameters", added)?;
        }
        // SAFETY: the handles are live, and the name ends with a zero byte.
        let made = unsafe {
            let backend = &raw mut self.backend;
            (functions.create_backend)(self.handle, BACKEND.as_ptr(), params.handle, backend)
        };
        check("creating the backend UCX", made)
    }

    /// Registers memory, for this agent's reads and for those of others.
    ///
    /// # Safety
    /// `kept` keeps so many bytes at `address` alive, where they are. What others write there while this agent lives is read as
    /// memory that changes at any time.
    pub(crate) unsafe fn register(
        &mut self,
        (kind, device): (Kind, u64),
        address: usize,
        bytes: usize,
        kept: Box<dyn Any + Send + Sync>,
    ) -> Result<(), NixlError> {
        // Kept in any case: a call that has failed may have registered a part.
        self.kept.push(kept);
        let functions = self.library.functions();
        let mut list = ptr::null_mut();
        // SAFETY: `list` is a place for the handle.
        let made = unsafe { (functions.create_reg_dlist)(kind.number().into(), &raw mut list) };
        check("listing memory", made)?;
        let list =
            List { handle: list, destroy: functions.destroy_reg_dlist, _functions: functions };
        // SAFETY: the list is live, and there is no metadata.
        let added = unsafe {
            (functions.reg_dlist_add_desc)(list.handle, address, bytes, device, ptr::null(), 0)
        };
        check("listing memory", added)?;
        // SAFETY: both handles are live, options may be null, and the memory is there by the caller's promise.
        let done = unsafe { (functions.register_mem)(self.handle, list.handle, ptr::null_mut()) };
        check("registering memory", done)
    }

    /// What other agents have to know of this one to read what is registered with it.
    pub(crate) fn metadata(&mut self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut bytes) = (ptr::null_mut(), 0);
        let functions = self.library.functions();
        // SAFETY: the handle is live, and both are places for the answer.
        let got = unsafe { (functions.get_local_md)(self.handle, &raw mut data, &raw mut bytes) };
        check("asking for an agent's metadata", got)?;
        // SAFETY: the library allocates the answer by `malloc` for its caller.
        Ok(unsafe { take_bytes(data, bytes) })
    }

    /// Takes in another agent's metadata; that agent's name.
    pub(crate) fn meet(&mut self, metadata: &[u8]) -> Result<CString, NixlError> {
        let mut name = ptr::null_mut();
        let functions = self.library.functions();
        // SAFETY: the handle is live, the bytes are read during the call, and `name` is a place for the answer.
        let loaded = unsafe {
            let data = metadata.as_ptr().cast();
            (functions.load_remote_md)(self.handle, data, metadata.len(), &raw mut name)
        };
        check("loading a peer's metadata", loaded)?;
        // SAFETY: the library allocates the name by `malloc` for its caller.
        let name = unsafe { take_string(name) };
        name.ok_or(NixlError::Descriptor { field: "metadata" })
    }

    fn list(
        &self,
        kind: Kind,
        entries: impl Iterator<Item = (usize, usize)>,
        device: u64,
    ) -> Result<List<'_>, NixlError> {
        let functions = self.library.functions();
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the handle.
        let made = unsafe { (functions.create_xfer_dlist)(kind.number().into(), &raw mut handle) };
        check("listing spans", made)?;
        let list = List { handle, destroy: functions.destroy_xfer_dlist, _functions: functions };
        for (address, bytes) in entries {
            // SAFETY: the list is live. Addresses are numbers to it.
            let added =
                unsafe { (functions.xfer_dlist_add_desc)(list.handle, address, bytes, device) };
            check("listing spans", added)?;
        }
        Ok(list)
    }

    /// Begins to read spans of another agent's memory, one behind the other, to `to` in memory of this kind and device. A read that has ended at once is
    /// over all the same when a [look](Self::look) says so.
    ///
    /// # Safety
    /// As many bytes at `to` are registered with this agent. Nothing reads or writes them until the read is over or the agent
    /// destroyed.
    pub(crate) unsafe fn read(
        &mut self,
        (name, there): (&CStr, &Descriptor),
        spans: &[Span],
        (kind, device, to): (Kind, u64, usize),
    ) -> Result<Request, NixlError> {
        // What is said to be the other agent's memory and is not, the library refuses: it knows what is registered there.
        let mut remote = Vec::with_capacity(spans.len());
        for span in spans {
            let pieces = there.pieces(*span).ok_or(NixlError::Descriptor { field: "regions" })?;
            remote.extend(pieces);
        }
        let mut at = to;
        let local = remote.iter().map(|&(_, bytes)| {
            let entry = (at, bytes);
            at += bytes;
            entry
        });
        let local = self.list(kind, local, device)?;
        let remote = self.list(there.kind, remote.into_iter(), there.device)?;
        let functions = self.library.functions();
        let mut handle = ptr::null_mut();
        // SAFETY: all handles are live; the name ends with a zero byte; options may be null.
        let made = unsafe {
            (functions.create_xfer_req)(
                self.handle,
                READ,
                local.handle,
                remote.handle,
                name.as_ptr(),
                &raw mut handle,
                ptr::null_mut(),
            )
        };
        check("preparing a read", made)?;
        drop((local, remote));
        let request = Request { handle: given("preparing a read", handle)? };
        // SAFETY: both handles are live. The memory is the read's alone, by the caller's promise.
        let posted = unsafe {
            (functions.post_xfer_req)(self.handle, request.handle.as_ptr(), ptr::null_mut())
        };
        match posted {
            SUCCESS | IN_PROGRESS => Ok(request),
            status => {
                self.release(request);
                Err(NixlError::Call { operation: BEGINNING, status: Status::of(status) })
            }
        }
    }

    /// Whether a read is over.
    pub(crate) fn look(&mut self, request: &Request) -> Look {
        let functions = self.library.functions();
        // SAFETY: both handles are live, and the request is this agent's.
        let status = unsafe { (functions.get_xfer_status)(self.handle, request.handle.as_ptr()) };
        match status {
            SUCCESS => Look::Done,
            IN_PROGRESS => Look::Open,
            status => Look::Failed(Status::of(status)),
        }
    }

    /// Gives up the handle of a read that is over.
    pub(crate) fn release(&mut self, request: Request) {
        let functions = self.library.functions();
        let handle = request.handle.as_ptr();
        // SAFETY: both handles are live, and the request is used by nobody else.
        unsafe { (functions.release_xfer_req)(self.handle, handle) };
        // SAFETY: as above, and it is not used again.
        unsafe { (functions.destroy_xfer_req)(handle) };
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let functions = self.library.functions();
        if !self.backend.is_null() {
            // SAFETY: the handle is live and not used again. It is a name for the backend, which is the agent's.
            unsafe { (functions.destroy_backend)(self.backend) };
        }
        // SAFETY: as above. With the agent its connections end, so that nothing is read or written any more: what it has kept
        // is dropped after this.
        unsafe { (functions.destroy_agent)(self.handle) };
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent").field("registered", &self.kept.len()).finish_non_exhaustive()
    }
}
