// Generated stubs on all services with toys at SPECREJ_ADDRESS; tests/clients starts both.

import static io.specrej.v1.CacheControl.CACHE_CONTROL_BYPASS;

import com.google.rpc.BadRequest;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.specrej.v1.GenerateRequest;
import io.specrej.v1.GenerateResponse;
import io.specrej.v1.GenerateStreamRequest;
import io.specrej.v1.GenerateStreamResponse;
import io.specrej.v1.GetRecordRequest;
import io.specrej.v1.Message;
import io.specrej.v1.OrchestratorServiceGrpc;
import io.specrej.v1.OrchestratorServiceGrpc.OrchestratorServiceBlockingStub;
import io.specrej.v1.Prompt;
import io.specrej.v1.Sampling;
import io.specrej.v1.Selection;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;

public final class ClientTest {
  private final ManagedChannel channel;

  private ClientTest(ManagedChannel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws Exception {
    String address = System.getenv("SPECREJ_ADDRESS");
    ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
    try {
      ClientTest test = new ClientTest(channel);
      test.answer();
      test.stream();
      test.errorHasTheFieldPath();
      test.cancellation();
      System.out.println("4 passed");
    } finally {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  private void answer() {
    GenerateResponse answer = stub().generate(request(40));
    check(!answer.getText().isEmpty(), "the answer has a text");
    check(answer.getUsage().getAnswerTokens() == 40, "the answer has 40 tokens");
  }

  private void stream() {
    int numRounds = 0;
    String text = "";
    for (Iterator<GenerateStreamResponse> events = events(40); events.hasNext(); ) {
      GenerateStreamResponse event = events.next();
      numRounds += event.hasRoundCompleted() ? 1 : 0;
      text = event.getFinished().getText();
    }
    check(numRounds == 3, "the stream has three rounds");
    check(!text.isEmpty(), "the last event is the answer");
  }

  private void errorHasTheFieldPath() throws Exception {
    try {
      stub().generate(request(-1));
    } catch (StatusRuntimeException error) {
      check(error.getStatus().getCode() == Status.Code.INVALID_ARGUMENT, "the code");
      for (com.google.protobuf.Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
        if (detail.is(BadRequest.class)) {
          String field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
          check(field.equals("sampling.max_tokens"), "the field is " + field);
          return;
        }
      }
    }
    throw new AssertionError("no BadRequest");
  }

  private void cancellation() throws Exception {
    io.grpc.Context.CancellableContext call = io.grpc.Context.current().withCancellation();
    String id = call.call(() -> events(4000).next().getAdmitted().getRequestId());
    call.cancel(null);
    GetRecordRequest request = GetRecordRequest.newBuilder().setRequestId(id).build();
    long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(30);
    while (!stub().getRecord(request).getRecord().getOutcome().equals("CANCELLED")) {
      check(System.nanoTime() < deadline, "the call ends");
      Thread.sleep(50);
    }
  }

  private OrchestratorServiceBlockingStub stub() {
    return OrchestratorServiceGrpc.newBlockingStub(channel).withDeadlineAfter(30, TimeUnit.SECONDS);
  }

  private Iterator<GenerateStreamResponse> events(int maxTokens) {
    GenerateStreamRequest request =
        GenerateStreamRequest.newBuilder().setRequest(request(maxTokens)).build();
    return stub().generateStream(request);
  }

  private static GenerateRequest request(int maxTokens) {
    Message turn =
        Message.newBuilder().setRole("user").setContent("Name three uses of a brick.").build();
    return GenerateRequest.newBuilder()
        .setPrompt(Prompt.newBuilder().addMessages(turn))
        .setSampling(Sampling.newBuilder().setMaxTokens(maxTokens).setIgnoreEos(true))
        .setSelection(Selection.newBuilder().setN(4))
        .setCacheControl(CACHE_CONTROL_BYPASS)
        .build();
  }

  private static void check(boolean condition, String message) {
    if (!condition) {
      throw new AssertionError(message);
    }
  }
}
