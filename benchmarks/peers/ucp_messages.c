/* The same messages by UCX and nothing else: tags, receives that are posted before, one thread that sleeps as
 * meshcast's do. What this takes is what the library takes.
 *
 *   ucp_messages SOCKET    both ranks; carries out the orders that calls/rounds.py sends, see orders.h
 */
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>

#include "orders.h"

enum { kPatience = 64, kMostWindow = 64 }; /* empty turns before it sleeps; messages in flight */
enum { kSingle = 1, kBatch = 2 };          /* tags */

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static int event_fd;
static void *single, *posted[kMostWindow]; /* receives that have not been waited for */
static int is_posted, batch_posted;

static void check(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  fprintf(stderr, "%s: %s\n", what, ucs_status_string(status));
  exit(1);
}

/* Ends a request, which is NULL where it was done at once. */
static void wait_for(void* request) {
  if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "a message");
  if (!request) return;
  int in_vain = 0;
  while (ucp_request_check_status(request) == UCS_INPROGRESS) {
    if (ucp_worker_progress(worker)) {
      in_vain = 0;
    } else if (++in_vain >= kPatience) {
      struct pollfd event = {.fd = event_fd, .events = POLLIN};
      if (ucp_worker_arm(worker) == UCS_OK) poll(&event, 1, -1);
      in_vain = 0;
    }
  }
  const ucs_status_t status = ucp_request_check_status(request);
  ucp_request_free(request);
  if (status != UCS_ERR_CANCELED) check(status, "a message");
}

static void* send_one(int tag) {
  const ucp_request_param_t param = {0};
  return ucp_tag_send_nbx(endpoint, mine, (size_t)bytes, (ucp_tag_t)tag, &param);
}

static void* post(int tag, int* out) {
  const ucp_request_param_t param = {0};
  return ucp_tag_recv_nbx(worker, out, (size_t)bytes, (ucp_tag_t)tag, ~(ucp_tag_t)0, &param);
}

static void post_single(void) {
  if (!is_posted) single = post(kSingle, outs[0]);
  is_posted = 1;
}

static void one(int sender) {
  post_single(); /* also the answer, before the message that it answers leaves */
  if (rank == sender) {
    wait_for(send_one(kSingle));
  } else {
    wait_for(single);
    is_posted = 0;
  }
}

static void post_batch(void) {
  for (; batch_posted < window; ++batch_posted) posted[batch_posted] = post(kBatch, outs[batch_posted]);
}

static void batch(void) {
  if (rank == 0) {
    void* sends[kMostWindow];
    for (int i = 0; i < window; ++i) sends[i] = send_one(kBatch);
    for (int i = 0; i < window; ++i) wait_for(sends[i]);
    return;
  }
  post_batch();
  for (int i = 0; i < window; ++i) wait_for(posted[i]);
  batch_posted = 0;
  post_batch(); /* for the next one, if it comes */
}

static void take_back(void* request) {
  if (request && !UCS_PTR_IS_ERR(request)) ucp_request_cancel(worker, request);
  wait_for(request);
}

static void forget(void) {
  if (is_posted) take_back(single);
  for (int i = 0; i < batch_posted; ++i) take_back(posted[i]);
  is_posted = batch_posted = 0;
}

static void failed(void* argument, ucp_ep_h ep, ucs_status_t status) {
  (void)argument, (void)ep;
  check(status, "the connection");
}

/* other: a socket to the other rank, which hands over its address. */
static void connect_ranks(int other) {
  ucp_config_t* config;
  check(ucp_config_read(NULL, NULL, &config), "ucp_config_read");
  const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                               .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP};
  check(ucp_init(&params, config, &context), "ucp_init");
  ucp_config_release(config);
  const ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                             .thread_mode = UCS_THREAD_MODE_SERIALIZED};
  check(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
  check(ucp_worker_get_efd(worker, &event_fd), "ucp_worker_get_efd");
  ucp_address_t* address;
  size_t length;
  check(ucp_worker_get_address(worker, &address, &length), "ucp_worker_get_address");
  char theirs[4096];
  if (send(other, address, length, 0) != (ssize_t)length || recv(other, theirs, sizeof theirs, 0) <= 0) exit(1);
  ucp_worker_release_address(worker, address);
  const ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                              .address = (const ucp_address_t*)theirs,
                              .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                              .err_handler.cb = failed};
  check(ucp_ep_create(worker, &ep, &endpoint), "ucp_ep_create");
}

int main(int argc, char** argv) {
  int sockets[2];
  if (argc != 2 || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) return 2;
  const pid_t child = fork();
  rank = child == 0;
  if (rank == 1) prctl(PR_SET_PDEATHSIG, SIGKILL);
  close(sockets[1 - rank]);
  connect_ranks(sockets[rank]);
  if (!serve(argv[1])) return 1;
  if (rank == 0) waitpid(child, NULL, 0); /* its connection ends with it, behind its last answer */
  _exit(0);
}
